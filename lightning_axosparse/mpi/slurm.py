"""Slurm: how the tasks that srun starts become the ranks of one MPI job."""

from __future__ import annotations

import os
import sys

TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by srun for the tasks of a step; Slurm's other variables reach processes that are none."""

START_RANKS = (
    "start them with `srun --mpi=pmi2 -K ...`; `srun --mpi=list` shows what this Slurm offers "
    "in the place of pmi2, and `-K` ends all ranks when one fails."
)
# What a process manager tells the ranks it starts, by the beginnings of the names.
_MANAGERS = ("PMI_", "PMIX_", "PALS_", "OMPI_", "MV2_", "JSM_", "I_MPI_PMI")


def unmanaged_tasks() -> int:
    """How many tasks this Slurm step has, if several and no process manager connects them; else 0.

    Only an MPI built for Slurm's old PMI-1 connects such tasks.
    """
    tasks = int(os.environ.get(TASKS, "1"))
    managed = any(name.startswith(_MANAGERS) for name in os.environ)
    return 0 if managed or tasks == 1 else tasks


def announce_unmanaged_tasks() -> None:
    """Say on stderr of the first task that its step is no MPI job, without importing anything.

    Torch and Lightning take a minute to import where many tasks share a core; nobody should wait
    so long for the refusal. It is no error yet: tasks may well work alone.
    """
    tasks = unmanaged_tasks()
    if tasks and os.environ.get("SLURM_PROCID") == "0":
        print(
            f"lightning_axosparse: srun started {tasks} tasks that know nothing of each other. To "
            f"train on them together, {START_RANKS}",
            file=sys.stderr,
            flush=True,
        )
