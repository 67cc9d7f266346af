"""Removes the files in ``/dev/shm`` through which MPICH's ranks of a node share memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_MAPS = Path("/proc/self/maps")
_PREFIX = "/dev/shm/mpich_shm_"


def unlink_segments(world: MPI.Comm) -> None:
    """Unlink the segments of this job, so that no crash leaves them behind.

    MPICH opens them by name only while MPI starts; the memory exists until the last process that
    has mapped it ends. Only segments that this process has mapped are unlinked, so none of another
    job. Segments of other MPIs have other names and are not unlinked.

    Args:
        world: all ranks of the job, which call this together.
    """
    world.Barrier()  # After it, all ranks have opened their segments.
    if _MAPS.exists():
        for line in _MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(_PREFIX):
                Path(path).unlink(missing_ok=True)
