"""Whereabouts: where a rank is and what it waits for, in memory that others may read."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from lightning_axosparse.grid import Grid

_WORDS = 200  # bytes of what is awaited, in words

Pass = Literal["forward", "backward"]


class RanksStuckError(RuntimeError):
    """A rank waits for what cannot come, or has waited for longer than ``timeout``.

    The message says where each rank is, and names those that do not answer.
    """


class Whereabouts(ctypes.Structure):
    """Where one rank is; written by plain stores, so that telling costs next to nothing.

    Attributes:
        pid: of its process.
        token: a random number, by which readers know that this is the memory they look for.
        loop: "training", "validation", "sanity check", "test" or "predict"; empty before the first.
        epoch: index of the epoch.
        batch: index of the last batch that a step began.
        in_step: whether that step is not over.
        microbatch: index of the micro-batch of the last pass in this batch; -1 before the first.
        backward: whether that was a backward pass.
        ended: whether this rank is through with the loop, or stands between two of its batches
            until all others do.
        stops: whether ``trainer.should_stop`` was set when it ended.
        waits: whether the rank waits.
        bulk: whether for so much data that their transfer may take long.
        awaited: for what, in words.
        progress: changes whenever a wait begins, ends, or sees something happen.
        beat: changes as long as the process runs, whatever its main thread does.
        alarm: whether this rank has given up waiting and asks all others where they are.
        reported: whether this rank has told where it is since.
        left: whether this rank has left word of its end: it returned, or told what it raised.
    """

    _fields_ = (
        ("pid", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("stage", ctypes.c_int64),
        ("replica", ctypes.c_int64),
        ("feed", ctypes.c_int64),
        ("epoch", ctypes.c_int64),
        ("batch", ctypes.c_int64),
        ("microbatch", ctypes.c_int64),
        ("progress", ctypes.c_int64),
        ("beat", ctypes.c_int64),
        ("in_step", ctypes.c_bool),
        ("backward", ctypes.c_bool),
        ("ended", ctypes.c_bool),
        ("stops", ctypes.c_bool),
        ("waits", ctypes.c_bool),
        ("bulk", ctypes.c_bool),
        ("alarm", ctypes.c_bool),
        ("reported", ctypes.c_bool),
        ("left", ctypes.c_bool),
        ("loop", ctypes.c_char * 16),
        ("host", ctypes.c_char * 64),
        ("awaited", ctypes.c_char * _WORDS),
    )

    def begin_run(self) -> None:
        """Be before the first batch of a call of the Trainer."""
        # The end of a loop of the last call could be taken for the end of the same loop in this.
        self.loop, self.ended, self.stops = b"", False, False

    @contextmanager
    def step(self, loop: str, epoch: int, batch: int) -> Iterator[None]:
        """Be in a step of a loop inside the context."""
        self.loop, self.epoch, self.batch = loop.encode(), epoch, batch
        self.microbatch, self.backward, self.ended = -1, False, False
        self.in_step = True
        yield
        self.in_step = False

    def end_loop(self, loop: str, epoch: int) -> int:
        """Be through with a loop.

        Returns:
            The number of its batches.
        """
        if (self.loop, self.epoch) != (loop.encode(), epoch):
            self.loop, self.epoch, self.batch = loop.encode(), epoch, -1
        self.ended = True
        return int(self.batch) + 1

    def begin_pass(self, kind: Pass, microbatch: int) -> None:
        """Be in a forward or backward pass."""
        self.microbatch, self.backward = microbatch, kind == "backward"

    def begin_wait(self, awaited: str, bulk: bool = False) -> None:
        """Wait for something, until :meth:`end_wait`."""
        self.bulk = bulk
        self.awaited = awaited.encode()[: _WORDS - 1]
        self.progress += 1
        self.waits = True

    def end_wait(self) -> None:
        """Go on."""
        self.waits = False
        self.progress += 1

    def place_in(self, grid: Grid) -> None:
        """Take a place in the grid of ranks."""
        self.rank, self.stage = grid.rank, grid.stage
        self.replica, self.feed = grid.replica, grid.feed

    @property
    def who(self) -> str:
        """The rank, in words."""
        place = f"rank {self.rank}"
        if self.stage >= 0:
            place += f" (stage {self.stage} of replica {self.replica})"
        return f"{place} on host {self.host.decode()}"

    @property
    def where(self) -> str:
        """What it does, in words."""
        loop = self.loop.decode()
        if not loop:
            return "before its first batch"
        if self.ended:
            stops = ", with trainer.should_stop set" if self.stops else ""
            return f"{loop} of epoch {self.epoch} over after {self.batch + 1} batches{stops}"
        batch = f"{loop} batch {self.batch} of epoch {self.epoch}"
        if not self.in_step:
            return f"after {batch}"
        if self.microbatch < 0:
            return f"in {batch}, before its first micro-batch"
        kind = "backward" if self.backward else "forward"
        return f"in {batch}, micro-batch {self.microbatch}, {kind} pass"

    @property
    def doing(self) -> str:
        """Where it is and what it waits for, in words."""
        if not self.waits:
            return self.where
        return f"{self.where}; waits for {self.awaited.decode(errors='replace')}"

    def __str__(self) -> str:
        return f"{self.who}: {self.doing}"


_here = Whereabouts(rank=-1, stage=-1)
_path = ""


def here() -> Whereabouts:
    """The whereabouts of this process."""
    return _here


def publish(rank: int, path: Path | None = None) -> str:
    """Let others read the whereabouts of this process, which is ``rank`` of its job.

    Args:
        rank: of this process in the job.
        path: a file to make for them; None for anonymous memory, which no crash leaves behind.

    Returns:
        The path under which other processes of this user and node can read it; empty where the
        system has no anonymous files. The first call decides.
    """
    global _here, _path
    if _path or (path is None and sys.platform != "linux"):
        return _path
    file = os.memfd_create("axosparse") if path is None else os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, ctypes.sizeof(Whereabouts))
    placed = Whereabouts.from_buffer(mmap.mmap(file, ctypes.sizeof(Whereabouts)))
    ctypes.pointer(placed)[0] = _here
    placed.host, placed.rank = socket.gethostname().encode()[:63], rank
    placed.token, placed.pid = secrets.randbits(62), os.getpid()
    _here, _path = placed, f"/proc/{os.getpid()}/fd/{file}" if path is None else str(path)
    atexit.register(leave)
    return _path


@contextmanager
def blocked(awaited: str) -> Iterator[None]:
    """Be inside calls of MPI that return only when the other ranks take part.

    Args:
        awaited: for what, in words.
    """
    here().begin_wait(awaited, bulk=True)  # It may take long on many ranks.
    try:
        yield
    finally:
        here().end_wait()


def leave() -> None:
    """Leave word that this process ends as it should, or has told why not."""
    _here.left = True


def read(path: str) -> Whereabouts:
    """The whereabouts of another process of this node, as they are at any time.

    Raises:
        OSError: if they cannot be read.
        ValueError: if these are no whereabouts.
    """
    file = os.open(path, os.O_RDWR)
    try:
        return Whereabouts.from_buffer(mmap.mmap(file, 0))
    finally:
        os.close(file)
