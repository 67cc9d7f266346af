"""Segments: the files in ``/dev/shm`` through which MPICH's ranks of a node share memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_MAPS = Path("/proc/self/maps")
_PREFIX = "/dev/shm/mpich_shm_"


def unlink_segments(world: MPI.Comm) -> None:
    """Remove the names of this job's segments, so that no crash leaves them behind.

    MPICH opens them by name while MPI starts and never again; the memory itself stays until the
    last process that has mapped it is gone. Only what this process has mapped is removed, so
    nothing of another job is. Other MPIs name theirs otherwise and keep them.

    Args:
        world: all ranks of the job, which call this together.
    """
    world.Barrier()  # Now all ranks have started, and have opened theirs.
    if _MAPS.exists():
        for line in _MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(_PREFIX):
                Path(path).unlink(missing_ok=True)
