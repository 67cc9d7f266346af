"""Detects tasks of srun that no process manager connects to an MPI job, and says what to do."""

from __future__ import annotations

import os
import sys

from lightning_axosparse.support.troubleshooting import see

TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by srun for the tasks of a step only; other variables of Slurm also for other processes."""

START_RANKS = (
    "start them with `srun --mpi=pmi2 -K ...`; `srun --mpi=list` shows what this Slurm offers "
    "in the place of pmi2, and `-K` ends all ranks when one fails."
)

MANAGERS = ("PMI_", "PMIX_", "PALS_", "OMPI_", "MV2_", "JSM_", "I_MPI_PMI")
"""Prefixes of the variables that a process manager sets for the ranks it starts."""


def unmanaged_tasks() -> int:
    """Number of tasks of this Slurm step if no process manager connects them; else 0.

    Only an MPI built for Slurm's old PMI-1 connects such tasks.
    """
    tasks = int(os.environ.get(TASKS, "1"))
    managed = any(name.startswith(MANAGERS) for name in os.environ)
    return 0 if managed or tasks == 1 else tasks


def announce_unmanaged_tasks() -> None:
    """Print on stderr of the first task that its step is no MPI job, without any import.

    Torch and Lightning take a minute to import where many tasks share a core, which is too long to
    wait for this message. It is not yet an error: the tasks may be meant to work alone.
    """
    tasks = unmanaged_tasks()
    if tasks and os.environ.get("SLURM_PROCID") == "0":
        print(
            f"lightning_axosparse: srun started {tasks} tasks that know nothing of each other. To "
            f"train on them together, {START_RANKS}" + see("starting-ranks"),
            file=sys.stderr,
            flush=True,
        )
