"""Where this process stands: as which rank of which MPI job, and with what MPI at hand."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.grid import Grid
from lightning_axosparse.mpi import slurm

# Set for the ranks of a job by Open MPI, by MPICH and its kin, by MVAPICH, by jsrun, and by srun.
_SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    slurm.TASKS,
)
_GET_MPI = (
    "Install one with `pip install 'lightning-axosparse[mpich]'`, or load your cluster's MPI "
    "module and build mpi4py with it: `pip install --no-binary mpi4py mpi4py`."
)


T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """The place of this process among the ranks of its job; a plain process is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    main_address: str = "127.0.0.1"


def job_size() -> int:
    """How many ranks the MPI job of this process has; 1 for a plain process.

    MPI is not initialised to find out, except under a PMIx launcher that tells the size to MPI
    alone.
    """
    for variable in _SIZE_VARIABLES:
        if variable in os.environ:
            return int(os.environ[variable])
    if "PMIX_RANK" not in os.environ:
        return 1
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


def check_connected() -> None:
    """Check that MPI connects the processes that were started together; every rank finds the same.

    Raises:
        MisconfigurationException: if MPI connects another number of ranks than were started.
    """
    if job_size() == 1:
        return
    from mpi4py import MPI

    connected = MPI.COMM_WORLD.size
    if connected == job_size():
        return
    if slurm.unmanaged_tasks():
        raise MisconfigurationException(
            f"srun started {job_size()} tasks, but MPI connects {connected} of them: the tasks "
            f"know nothing of each other. To train on them together, {slurm.START_RANKS}"
        )
    raise MisconfigurationException(
        f"{job_size()} processes were started, but MPI connects {connected} of them. The "
        f"launcher and the MPI library that mpi4py loads ({_library()}) do not fit together: "
        "use the mpiexec of that library, or under Slurm the right `srun --mpi=...` "
        "(`srun --mpi=list` shows them)."
    )


@cache
def placement() -> Placement:
    """The place of this process in its job; the first call is collective over all ranks.

    Raises:
        MisconfigurationException: if MPI connects another number of ranks than were started.
    """
    if job_size() == 1:
        return Placement()
    check_connected()
    from mpi4py import MPI

    from lightning_axosparse.mpi.segments import unlink_segments

    world = MPI.COMM_WORLD
    unlink_segments(world)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    first_ranks = sorted(set(world.allgather(node.bcast(world.rank))))
    here = Placement(
        rank=world.rank,
        world_size=world.size,
        local_rank=node.rank,
        node_rank=first_ranks.index(node.bcast(world.rank)),
        nodes=len(first_ranks),
        main_address=world.bcast(_address(nodes=len(first_ranks))),
    )
    node.Free()
    return here


def _address(nodes: int) -> str:
    return os.environ.get("MASTER_ADDR", "127.0.0.1" if nodes == 1 else socket.gethostname())


def _library() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().split("\n")[0].strip()


def from_first_rank(decide: Callable[[], T]) -> T:
    """What ``decide`` returns on rank 0, on every rank; collective over the job, before setup."""
    if job_size() == 1:
        return decide()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    decision: T = world.bcast(decide() if world.rank == 0 else None)
    return decision


class MPIJobEnvironment(ClusterEnvironment):
    """Answers Lightning from MPI in a job of several ranks, and as one rank in a plain process.

    It keeps no state, so it may travel to the ranks of a job inside a pickled strategy.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process is one of several ranks already."""
        return job_size() > 1

    @property
    def main_address(self) -> str:
        """The host of rank 0."""
        return placement().main_address

    @property
    def main_port(self) -> int:
        """A free port of this host; the ranks connect by MPI and do not use it."""
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    @staticmethod
    def detect() -> bool:
        """Whether this process is a rank of an MPI job of several."""
        return job_size() > 1

    def world_size(self) -> int:
        """Number of ranks."""
        return placement().world_size

    def set_world_size(self, size: int) -> None:
        """Ignored: MPI knows."""

    def global_rank(self) -> int:
        """This rank's number in the job."""
        return placement().rank

    def set_global_rank(self, rank: int) -> None:
        """Ignored: MPI knows."""

    def local_rank(self) -> int:
        """This rank's number on its node."""
        return placement().local_rank

    def node_rank(self) -> int:
        """The number of this rank's node."""
        return placement().node_rank


def find_mpiexec() -> str | None:
    """The mpiexec beside this Python, which belongs to an MPI from PyPI, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@cache
def check_mpi_available() -> None:
    """Check that ranks can be started, without initialising MPI in this process.

    Raises:
        MisconfigurationException: if no mpiexec or no MPI library is found; says how to get one.
    """
    if find_mpiexec() is None:
        raise MisconfigurationException(
            "Several ranks were asked for, but there is no `mpiexec` to start them: neither beside "
            f"{sys.executable} nor on PATH. {_GET_MPI}"
        )
    probe = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise MisconfigurationException(
            f"Several ranks were asked for, but mpi4py finds no MPI library ({reason}). {_GET_MPI}"
        )


def limit_threads() -> None:
    """Give torch one thread in this rank, unless the user chose with ``OMP_NUM_THREADS``."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def describe_rank(rank: int, grid: Grid | None = None) -> str:
    """Name a rank for people: ``"rank 3 (stage 1 of replica 1)"``."""
    return f"rank {rank}" + (f" (stage {grid.stage} of replica {grid.replica})" if grid else "")


def abort_job(exception: BaseException, grid: Grid | None = None) -> None:
    """End all ranks of the job because this one failed, after saying which and why on stderr.

    A plain process has no other ranks to end, and goes on.
    """
    if job_size() == 1:
        return
    from mpi4py import MPI

    sys.stdout.flush()
    trace = "".join(traceback.format_exception(exception))
    print(f"Failed on {describe_rank(MPI.COMM_WORLD.rank, grid)}:\n{trace}", file=sys.stderr)
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
