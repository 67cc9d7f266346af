"""The MPI job of this process: its rank, its size, and whether ranks can be started or ended."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.mpi.mpich import check_room, unlink_segments
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:
    from mpi4py import MPI


_TASKS = "SLURM_STEP_NUM_TASKS"  # Unlike other variables of Slurm, only set for tasks of srun.
_MANAGERS = ("PMI_", "PMIX_", "PALS_", "OMPI_", "MV2_", "JSM_", "I_MPI_PMI")
"""Prefixes of the variables that a process manager sets for the ranks it starts."""
# Set for the ranks of a job by Open MPI, MPICH and its derivatives, MVAPICH, jsrun, and srun.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    _TASKS,
)
_SECONDS_TO_PRINT = 0.3
"""How long a rank waits between its message and the end of the job, when mpiexec would drop
output that it has not printed yet."""
_ABORT_SECONDS = 2  # If MPI cannot end the job by then, the rank ends itself.
_SEGMENT = 1.1
"""MiB of a rank's part of the segment that MPICH creates on a node."""

_unanswered: list[Any] = []  # Keeps buffers alive into which MPI may still write.
_GET_MPI = (
    "Install one with `pip install mpich`, or load your cluster's MPI "
    "module and build mpi4py with it: `pip install --no-binary mpi4py mpi4py`."
)


@dataclass(frozen=True)
class Placement:
    """The rank of this process in its job; a process without a job is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    main_address: str = "127.0.0.1"


def job_size() -> int:
    """Return the number of ranks in the MPI job of this process; 1 for a process without a job.

    It initializes MPI only under a PMIx launcher, which sets no variable with the size.
    """
    for variable in _SIZE_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    if "PMIX_RANK" not in os.environ:
        return 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def torchrun_processes() -> int:
    """Return the number of processes that torchrun has started; 0 if it is one, or none."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    return size if size > 1 else 0


def unmanaged_tasks() -> int:
    """Return the number of tasks of this Slurm step if no process manager connects them; else 0.

    Only an MPI built for Slurm's old PMI-1 connects such tasks.
    """
    tasks = int(os.environ.get(_TASKS, "1"))
    managed = any(name.startswith(_MANAGERS) for name in os.environ)
    return 0 if managed or tasks == 1 else tasks


def world_communicator() -> MPI.Intracomm:
    """Return the communicator of all ranks of the job; the first call initializes MPI."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def check_connected() -> None:
    """Check that MPI connects all processes that were started together."""
    if job_size() == 1:
        if processes := torchrun_processes():
            raise MisconfigurationException(
                f"torchrun started {processes} processes, but the ranks of this strategy are those "
                f"of an MPI job. Start them with `mpiexec -n {processes} python train.py`, under "
                "Slurm with `srun --mpi=pmi2 -K python train.py`, or start `python train.py`, "
                "which starts its ranks itself." + see("starting-ranks")
            )
        return
    if "mpi4py.MPI" not in sys.modules and "MPI_LOCALNRANKS" in os.environ:
        # Faster ranks of the node may have taken all but their parts of the segment already.
        check_room(int(os.environ["MPI_LOCALNRANKS"]), once=0.0, each=_SEGMENT)
    from mpi4py import MPI

    connected = MPI.COMM_WORLD.size
    if connected == job_size():
        return
    if unmanaged_tasks():
        raise MisconfigurationException(
            f"srun started {job_size()} tasks, but MPI connects {connected} of them: the tasks "
            "know nothing of each other. To train on them together, start them with `srun "
            "--mpi=pmi2 -K ...`; `srun --mpi=list` shows the alternatives to pmi2 of this Slurm, "
            "and `-K` ends all ranks when one fails." + see("starting-ranks")
        )
    raise MisconfigurationException(
        f"{job_size()} processes were started, but MPI connects {connected} of them. The "
        f"launcher and the MPI library that mpi4py loads ({_library()}) do not fit together: "
        "use the mpiexec of that library, or under Slurm the right `srun --mpi=...` "
        "(`srun --mpi=list` shows them)." + see("starting-ranks")
    )


@cache  # A process stays the same rank.
def placement() -> Placement:
    """Return the placement of this process; the first call is collective over all ranks."""
    if job_size() == 1:
        return Placement()
    check_connected()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    unlink_segments(world)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    first_ranks = sorted(set(world.allgather(node.bcast(world.rank))))
    placed = Placement(
        rank=world.rank,
        world_size=world.size,
        local_rank=node.rank,
        node_rank=first_ranks.index(node.bcast(world.rank)),
        nodes=len(first_ranks),
        main_address=world.bcast(_address(nodes=len(first_ranks))),
    )
    node.Free()
    return placed


def _address(nodes: int) -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1" if nodes == 1 else socket.gethostname())


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().split("\n")[0].strip()


class MPIJobEnvironment(ClusterEnvironment):
    """Lightning's view of the MPI job; a process without a job is one rank.

    It has no state, so it can be pickled with a strategy that is sent to the ranks of a job.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process already is one of several ranks."""
        return job_size() > 1

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return placement().main_address

    @property
    def main_port(self) -> int:
        """A free port of this host; ranks connect by MPI and do not use it."""
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    @staticmethod
    def detect() -> bool:
        """Whether this process is one of several ranks of an MPI job."""
        return job_size() > 1

    def world_size(self) -> int:
        """Number of ranks."""
        return placement().world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: MPI decides."""

    def global_rank(self) -> int:
        """This rank's number in the job."""
        return placement().rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: MPI decides."""

    def local_rank(self) -> int:
        """This rank's number on its node."""
        return placement().local_rank

    def node_rank(self) -> int:
        """The number of this rank's node."""
        return placement().node_rank


def find_mpiexec() -> str | None:
    """Return the mpiexec in the folder of this Python (an MPI from PyPI), else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def check_can_start(ranks: int) -> None:
    """Check that ranks can be started on this node, without initializing MPI in this process."""
    if _library_found().startswith("MPICH"):
        check_room(ranks)


@cache  # The check starts a process.
def _library_found() -> str:
    """Return the version text of the MPI library."""
    if find_mpiexec() is None:
        raise MisconfigurationException(
            "Several ranks were asked for, but there is no `mpiexec` to start them: neither beside "
            f"{sys.executable} nor on PATH. {_GET_MPI}" + see("starting-ranks")
        )
    probe = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI\n"
        "print(MPI.Get_library_version())"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MisconfigurationException(
            f"Several ranks were asked for, but mpi4py finds no MPI library ({reason}). {_GET_MPI}"
            + see("starting-ranks")
        )
    return done.stdout


@contextmanager
def limited_threads() -> Iterator[None]:
    """Let torch use one thread in this rank, unless ``OMP_NUM_THREADS`` is set."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def all_arrive(place: Sequence[int], seconds: float) -> bool:
    """Return whether all ranks of the job call this within some seconds, with the same ``place``.

    Args:
        place: integers, equally many on all ranks.
        seconds: how long to wait for the other ranks.
    """
    own = np.array(place, dtype=np.int64)
    everyone = np.empty((placement().world_size, len(own)), dtype=np.int64)
    began, request = monotonic(), world_communicator().Iallgather(own, everyone)
    while not request.Test():
        if monotonic() - began > seconds:
            _unanswered.append((request, own, everyone))
            return False
        sleep(0.01)
    return bool((everyone == own).all())


def abort_job(exception: BaseException) -> None:
    """Print the rank and the exception to stderr, and end all ranks of the job.

    In a process without a job, do nothing.
    """
    if job_size() == 1:
        return
    sys.stdout.flush()
    this_rank().rank = world_communicator().rank  # It may have failed before this was set.
    trace = "".join(traceback.format_exception(exception))
    print(f"Failed on {this_rank().name}:\n{trace}", file=sys.stderr)
    sys.stderr.flush()
    abort()


def abort() -> None:
    """End all ranks of the job, or this one if MPI cannot."""
    sleep(_SECONDS_TO_PRINT)
    last_resort = threading.Timer(_ABORT_SECONDS, os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    world_communicator().Abort(1)
    os._exit(1)  # MPICH's Abort may return if two ranks call it.
