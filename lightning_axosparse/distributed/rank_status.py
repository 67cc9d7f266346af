"""The status of each rank, with its position and its wait, in memory that its node can read."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_axosparse.distributed.grid import Grid

_NUMBERS = (
    *("pid", "proxy", "token", "rank", "stage", "replica"),
    *("epoch", "batch", "progress", "signal"),
)
_FLAGS = ("running", "leaves", "waits", "bulk", "alarm", "reported", "finished")
_BYTES = {"host": 64, "loop": 16, "where": 120, "awaited": 200}

_POLLS = 20
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3
_SLEEP_FRACTION = 0.05


class RanksStuckError(RuntimeError):
    """A rank waits for something that cannot happen, or has waited for longer than ``timeout``.

    The message has the status of each rank, and names those that do not answer.
    """


class RankStatus(ctypes.Structure):
    """The status of one rank. Updates are plain stores, so they take hardly any time.

    Attributes:
        pid: the process ID.
        proxy: the process ID of the proxy of MPICH's mpiexec that has started it; 0 for none.
        token: a random number by which readers recognize this memory.
        loop: "training", "validation", "sanity check", "test" or "predict"; empty before the first.
        epoch: index of the epoch.
        batch: index of the batch of the last step.
        where: loop, batch and pass, in words.
        waits: whether the rank waits.
        bulk: whether it waits for so much data that the transfer may take long.
        awaited: the event that it waits for, in words.
        progress: a counter that changes when a wait begins or ends, or an awaited part arrives.
        waited: seconds for which the watchdog has seen this wait.
        beat: the time at which the watchdog last ran, by the clock of the node.
        signal: the number of the last signal on which all ranks act together; 0 for none.
        running: whether a call of the Trainer runs, so that the process must not end yet.
        leaves: whether all ranks have agreed to end the call, after callbacks have saved.
        alarm: whether this rank ends the job, and asks all others for their status.
        reported: whether this rank has reported its status after an alarm.
        finished: whether this rank has returned, or has reported the exception that ended it.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_double) for name in ("waited", "beat")),
        *((name, ctypes.c_bool) for name in _FLAGS),
        *((name, ctypes.c_char * size) for name, size in _BYTES.items()),
    )

    _step = b"a batch"
    """The batch of the last step, in words."""

    def begin_run(self) -> None:
        """Record that a call of the Trainer begins."""
        self.loop, self.where = b"", b"before its first batch"
        self.signal, self.running, self.leaves = 0, True, False

    def end_run(self) -> None:
        """Record that a call of the Trainer has ended."""
        self.running = False

    @contextmanager
    def step(self, loop: str, epoch: int, batch: int) -> Iterator[None]:
        """Record that a step of a loop runs inside the context."""
        self.loop, self.epoch, self.batch = loop.encode(), epoch, batch
        self._step = b"%b batch %d of epoch %d" % (self.loop, batch, epoch)
        self.where = b"in %b, before its first micro-batch" % self._step
        yield
        self.where = b"after %b" % self._step

    def begin_pass(self, kind: str, microbatch: int) -> None:
        """Record that a forward or backward pass begins."""
        self.where = b"in %b, micro-batch %d, %b pass" % (self._step, microbatch, kind.encode())

    def end_loop(self, loop: str, epoch: int) -> int:
        """Record that a loop has ended; return the number of its batches."""
        if (self.loop, self.epoch) != (loop.encode(), epoch):
            self.loop, self.epoch, self.batch = loop.encode(), epoch, -1
        return int(self.batch) + 1

    def between_loops(self, stops: bool) -> None:
        """Record that this rank waits for all others to end the loop.

        ``stops`` says whether ``trainer.should_stop`` is set.
        """
        if self.loop:
            reason = b", with trainer.should_stop set" if stops else b""
            values = self.loop, self.epoch, self.batch + 1, reason
            self.where = b"%b of epoch %d over after %d batches%b" % values

    def begin_wait(self, awaited: str, bulk: bool = False) -> None:
        """Record that this rank waits for something, until :meth:`end_wait`."""
        self.bulk = bulk
        self.awaited = awaited.encode()[: _BYTES["awaited"] - 1]
        self.progress += 1
        self.waits = True

    def end_wait(self) -> None:
        """Record that the wait is over."""
        self.waits = False
        self.progress += 1

    def set_grid(self, grid: Grid) -> None:
        """Record the position of this rank in the grid."""
        self.rank, self.stage, self.replica = grid.rank, grid.stage, grid.replica

    @property
    def name(self) -> str:
        """The rank in words, such as ``"rank 3 (stage 1 of replica 1)"``."""
        stage = f" (stage {self.stage} of replica {self.replica})" if self.stage >= 0 else ""
        return f"rank {self.rank}{stage}"

    @property
    def who(self) -> str:
        """The rank and its host, in words."""
        return f"{self.name} on host {self.host.decode()}"

    @property
    def activity(self) -> str:
        """The position in the run, and the wait, if there is one, in words."""
        where = self.where.decode()
        if not self.waits:
            return where
        return f"{where}; waits for {self.awaited.decode(errors='replace')}"

    def __str__(self) -> str:
        return f"{self.who}: {self.activity}"


# A process is one rank, and has one status. Other processes read it in memory, by its path.
_status = RankStatus(rank=-1, stage=-1, where=b"before its first batch")
_path = ""


def this_rank() -> RankStatus:
    """Return the status of this process."""
    return _status


def publish(rank: int, path: Path | None = None, parent: int = 0) -> str:
    """Let other processes read the status of this process, which is ``rank`` of its job.

    Args:
        rank: the rank of this process in the job.
        path: a file to create for the status; None for anonymous memory, which disappears with the
            process.
        parent: the process that has started this rank; 0 for the parent of this process.

    Returns:
        The path for :func:`read_status` in other processes of this user and node; empty if the
        system has no anonymous files. Later calls in this process return the same path.
    """
    global _status, _path
    if _path or (path is None and sys.platform != "linux"):
        return _path
    file = os.memfd_create("axosparse") if path is None else os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, ctypes.sizeof(RankStatus))
    published = RankStatus.from_buffer(mmap.mmap(file, ctypes.sizeof(RankStatus)))
    ctypes.pointer(published)[0] = _status
    published.host, published.rank = socket.gethostname().encode()[:63], rank
    published.token, published.pid = secrets.randbits(62), os.getpid()
    published.proxy = _proxy(parent or os.getppid())
    _status, _path = published, f"/proc/{os.getpid()}/fd/{file}" if path is None else str(path)
    atexit.register(mark_finished)
    return _path


def _proxy(parent: int) -> int:
    """Return ``parent`` if it is a proxy of MPICH's mpiexec, else 0."""
    try:
        name = Path(f"/proc/{parent}/comm").read_text()
    except OSError:
        return 0
    return parent if name == "hydra_pmi_proxy\n" else 0


@contextmanager
def blocked(awaited: str) -> Iterator[None]:
    """Record a wait for other ranks during collective calls of MPI inside the context."""
    this_rank().begin_wait(awaited, bulk=True)  # On many ranks such calls may take long.
    try:
        yield
    finally:
        this_rank().end_wait()


def mark_finished() -> None:
    """Record that this process ends normally, or has reported the exception that ends it."""
    _status.finished = True


def read_status(path: str) -> RankStatus:
    """Return the status of another process of this node, whose attributes stay up to date."""
    file = os.open(path, os.O_RDWR)
    try:
        return RankStatus.from_buffer(mmap.mmap(file, 0))
    finally:
        os.close(file)


class BackOff:
    """Polls 20 times without a pause, then sleeps between polls for 5 % of the time waited so far.

    A sleep takes at least 20 us and at most a millisecond, so it prolongs a wait only a little:
    after a wait of 10 ms, it takes 0.5 ms. MPI's own blocking waits spin, and shorter sleeps take a
    tenth of a core; both slow down the other ranks if there are more ranks than cores.

    It is the context manager of a wait. The first sleep records the wait in the rank's status.

    Args:
        awaited: returns a description of the awaited event, with the rank from which it comes.
        bulk: whether so much data is awaited that the transfer may take long.
    """

    def __init__(self, awaited: Callable[[], str], bulk: bool = False) -> None:
        self._awaited, self._bulk = awaited, bulk
        self._recorded = False
        self._polls = 0
        self._since = time.monotonic()

    def __enter__(self) -> BackOff:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._recorded:
            this_rank().end_wait()

    def pause(self) -> None:
        """Pause before the next poll."""
        self._polls += 1
        if self._polls > _POLLS:
            if not self._recorded:
                self._recorded = True
                this_rank().begin_wait(self._awaited(), self._bulk)
            waited = time.monotonic() - self._since
            time.sleep(min(_MAX_SLEEP, max(_MIN_SLEEP, _SLEEP_FRACTION * waited)))

    def reset(self) -> None:
        """Start from the first poll again, after a poll with a result."""
        self._polls = 0
        self._since = time.monotonic()
        if self._recorded:
            this_rank().begin_wait(self._awaited(), self._bulk)


def exit_code(pid: int) -> int | None:
    """Return the exit code of an ended process, or the negative number of the signal that ended it.

    It is None if the parent has already read the code.
    """
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None


def describe_end(code: int | None) -> str:
    """Return the rest of a sentence about the end of a rank, from its :func:`exit_code`."""
    if code is None:
        return "ended without a report: killed, or by `os._exit`."
    if code >= 0:
        return (
            f"ended with exit code {code} before its work was done, as by `os._exit`; its output "
            "above may say why."
        )
    memory = " The kernel does that when memory runs out." if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}.{memory}"
