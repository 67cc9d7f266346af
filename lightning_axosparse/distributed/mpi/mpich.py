"""Handles two things that MPICH does not: files of shared memory, and ranks that end early."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:
    from mpi4py import MPI


_MAPS = Path("/proc/self/maps")
_FOLDER = Path("/dev/shm")
_PREFIX = "/dev/shm/mpich_shm_"

_ONCE, _EACH = 9.5, 5.3
"""MiB of shared memory that MPICH needs to start, once and for each rank (measured with UCX)."""

_START_SECONDS = 600
"""No MPI takes so long to start."""

_CONNECTION = "PMI_FD"
"""The environment variable with the file descriptor that connects a rank to its proxy."""
_HOLD = "read line; sleep 5"  # `read` returns when the rank ends.


def check_room(ranks: int, once: float = _ONCE, each: float = _EACH) -> None:
    """Check that ``/dev/shm`` has room for the ranks of a node, before MPICH starts.

    Without room the system kills a rank when it writes there.
    """
    if not _FOLDER.is_dir():
        return
    remove_leftovers()
    needed, space = once + each * ranks, shutil.disk_usage(_FOLDER)
    free, size = space.free / 2**20, space.total / 2**20
    if free < needed:
        raise MisconfigurationException(
            f"The shared memory of this node, {_FOLDER}, has {free:.1f} of {size:.1f} MiB free, "
            f"and MPI needs {needed:.1f} MiB to start {ranks} ranks. Remove unused files there, "
            "or make it larger: `docker run --shm-size=1g`, `mount -o remount,size=1g "
            f"{_FOLDER}`." + see("starting-ranks")
        )


def remove_leftovers() -> None:
    """Remove segments of this user whose job was killed while MPI started.

    Only old segments are removed. If one is still in use, all ranks have opened it and do not need
    its name.
    """
    for path in _FOLDER.glob(f"{Path(_PREFIX).name}*"):
        try:
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _START_SECONDS:
                path.unlink()
        except OSError:  # Another process has removed it.
            continue


def unlink_segments(world: MPI.Comm) -> None:
    """Unlink the segments of this job, so that no crash leaves them behind; collective.

    MPICH opens them by name only while MPI starts; the memory exists until the last process that
    has mapped it ends. Only segments that this process has mapped are unlinked, so none of another
    job. Segments of other MPIs have other names and are not unlinked.
    """
    world.Barrier()  # After it, all ranks have opened their segments.
    if _MAPS.exists():
        for line in _MAPS.read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if path.startswith(_PREFIX):
                Path(path).unlink(missing_ok=True)


def hold_files() -> None:
    """Start a small process that holds this rank's connection to mpiexec's proxy open.

    When a connection closes, the proxy ends all ranks before they can report which one is gone; if
    that one has left with exit code 0, the job would count as complete. The process holds the
    connection for 5 s after the rank has ended, in which the ranks end the job themselves.
    """
    if this_rank().proxy and _CONNECTION in os.environ:
        files = [int(os.environ[_CONNECTION])]
        holder = subprocess.Popen(["sh", "-c", _HOLD], stdin=subprocess.PIPE, pass_fds=files)
        atexit.register(holder.kill)  # MPI waits for the proxy when it ends.
