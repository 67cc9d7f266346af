"""Ends the job when a rank waits for something that cannot happen, or for too long.

A thread of each rank reads the statuses of all others every second. Ranks on its node have them in
shared memory; ranks of other nodes send theirs by MPI while a rank waits, if MPI lets threads send.
The thread detects that a rank is gone, that one has received SIGTERM, and that all ranks of a node
wait for one another. If the reason is not certain, as in a long transfer between nodes, ``timeout``
ends the wait.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache

from mpi4py import MPI

from lightning_axosparse.distributed.mpi.environment import abort
from lightning_axosparse.distributed.mpi.mpich import hold_files
from lightning_axosparse.distributed.rank_status import (
    RanksStuckError,
    RankStatus,
    describe_end,
    exit_code,
    publish,
    read_status,
    this_rank,
)
from lightning_axosparse.support.troubleshooting import see

NOTICE_SECONDS = float(os.environ.get("AXOSPARSE_NOTICE_SECONDS", 30))
"""A rank that has waited for so long prints that it waits."""

DEADLOCK_SECONDS = NOTICE_SECONDS
"""If all ranks have only waited for so long, the job is ended."""

TICK_SECONDS = min(1.0, NOTICE_SECONDS / 10)
"""The interval at which a watchdog looks at the other ranks."""

ANSWER_SECONDS = 5 * TICK_SECONDS
"""How long a rank that ends the job waits for the statuses of the others."""

MEETING_SECONDS = 2.0
"""How long after a SIGTERM the ranks may continue to a point where all can end together."""

_QUESTION, _ANSWER = range(2)  # Tags of messages.
_CAUSES = (
    "Give every rank the same number of batches, let `on_train_batch_start` return -1 and "
    "`trainer.should_stop` be set on all ranks or none, and call `self.log(..., sync_dist=True)` "
    "and other collectives on all of them."
)
_TURN_SECONDS = 0.5  # So long the other ranks of a node let the first one report the reason.

before_abort: list[Callable[[BaseException], None]] = []
"""Functions that are called with the reason before the watchdog ends the job. The launcher's worker
adds one that reports the reason to the caller, before it starts the watchdog."""


class Peer:
    """Another rank, whose status is read by its path if a token confirms the path."""

    def __init__(self, rank: int, host: str, path: str, token: int, pid: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on host {host}"
        self.status: RankStatus | None = None
        """In shared memory if the rank is on this node, else the last status that it sent."""
        self.process: int | None = None
        """A file that is readable when the process has ended, if the rank is on this node."""
        try:
            status = read_status(path)
            if status.token == token:
                self.process, self.status = os.pidfd_open(pid), status
        except (OSError, ValueError, AttributeError):  # On another host, or another system.
            pass

    @property
    def answers(self) -> bool:
        """Whether the rank has reported its status since it was asked."""
        return self.status is not None and bool(self.status.reported or self.status.finished)

    @property
    def is_idle(self) -> bool:
        """Whether it is certain that the rank has only waited, for long enough to end the job.

        A transfer between nodes may take long, and a stopped process only seems to wait.
        """
        if self.status is None or self.process is None:
            return False
        is_stopped = time.monotonic() - self.status.beat > 4 * TICK_SECONDS
        return bool(self.status.finished) or (_is_idle(self.status) and not is_stopped)

    def __str__(self) -> str:
        return f"{self.name}: not seen" if self.status is None else str(self.status)


def _is_idle(status: RankStatus) -> bool:
    return bool(status.waits and not status.bulk and status.waited >= DEADLOCK_SECONDS)


class StatusMessages:
    """Exchanges statuses by MPI with the watchdogs of other nodes, if MPI lets a thread send."""

    def __init__(self, comm: MPI.Intracomm, peers: Sequence[Peer]) -> None:
        self._comm = comm
        allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._peers = {p.rank: p for p in peers if p.process is None and allowed}
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def exchange(self, ask: bool) -> None:
        """Receive statuses, answer questions, and ask all peers if ``ask``."""
        if not self._peers or MPI.Is_finalized():  # A script may have ended MPI itself.
            return
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data = bytearray(ctypes.sizeof(RankStatus))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv([data, MPI.BYTE], source, tag)
            self._peers[source].status = RankStatus.from_buffer(data)
            if tag == _QUESTION and not ask:
                self._send(source, _ANSWER)
        # On a dead link messages are never sent, so their number is limited.
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]
        if ask and len(self._sent) < 4 * len(self._peers):
            for rank in self._peers:
                self._send(rank, _QUESTION)

    def _send(self, rank: int, tag: int) -> None:
        data = bytes(this_rank())
        self._sent.append((self._comm.Isend([data, MPI.BYTE], rank, tag), data))


class Watchdog(threading.Thread):
    """The thread that watches the ranks; it runs until this process ends."""

    def __init__(self, peers: Sequence[Peer], comm: MPI.Intracomm) -> None:
        super().__init__(name="axosparse-watchdog", daemon=True)
        self.timeout = float("inf")
        self._peers, self._messages = peers, StatusMessages(comm, peers)
        self._progress = -1
        self._since_sigterm = self._since_alarm = 0.0
        self._reads, self._writes = os.pipe()
        # Files of processes that have ended, and that of the pipe once this thread has to end.
        self._readable: set[int] = set()
        self._files = select.poll()
        for file in (self._reads, *(peer.process for peer in peers if peer.process is not None)):
            self._files.register(file, select.POLLIN)

    def stop(self) -> None:
        """End the thread."""
        os.write(self._writes, b"\0")
        self.join()

    def received_signal(self) -> RankStatus | None:
        """Return the status of a rank with a signal, preferably SIGTERM; None if there is none."""
        ranks = [rank for rank in (this_rank(), *self._statuses) if rank.signal]
        return max(ranks, key=lambda rank: rank.signal == signal.SIGTERM, default=None)

    @property
    def _statuses(self) -> list[RankStatus]:
        return [peer.status for peer in self._peers if peer.status is not None]

    @property
    def _another_alarms(self) -> bool:
        return any(status.alarm for status in self._statuses)

    def run(self) -> None:
        """Look at all ranks until this process ends, and end the job if it cannot go on."""
        before = time.monotonic()
        while self._reads not in self._readable:
            for file, _ in self._files.poll(1000 * TICK_SECONDS):
                self._files.unregister(file)
                self._readable.add(file)
            now = time.monotonic()
            # If more time has passed, this process was stopped, and did not wait.
            elapsed = min(now - before, 2 * TICK_SECONDS)
            cause, reason = self._cause(elapsed), self.look(elapsed)
            if cause or reason:
                time.sleep(self._turn)  # Meanwhile the first rank usually ends the job.
            if cause:
                self._end(cause)
            elif reason and (self._since_alarm or not self._another_alarms):
                self._end(reason + self._ask())
            before = now

    def _cause(self, elapsed: float) -> str:
        """Return the reason to end the job even if this rank does not wait; empty if none."""
        lost = [p.status for p in self._peers if p.process in self._readable and p.status]
        lost = [status for status in lost if not status.finished]
        # The launcher itself detects which of its ranks was lost first.
        at_once = not before_abort and any(rank.running for rank in lost)
        if lost and (at_once or this_rank().waited >= 2 * TICK_SECONDS):
            return "\n".join(
                f"{rank.who} {describe_end(exit_code(rank.pid))} It was {rank.activity}."
                for rank in lost
            )
        received = self.received_signal()
        if received is None or received.signal != signal.SIGTERM or this_rank().leaves:
            self._since_sigterm = 0.0
            return ""
        self._since_sigterm += elapsed
        # This rank may notice it a tick late, and the first one, on another node, one more later.
        if self._since_sigterm < MEETING_SECONDS + 2 * TICK_SECONDS:
            return ""
        return f"{received.who} received SIGTERM, which ends the job. It was {received.activity}."

    @property
    def _turn(self) -> float:
        """Seconds in which the first rank of the node may report a reason that all have seen."""
        near = [p for p in self._peers if p.process is not None]
        alive = [p.rank for p in near if p.process not in self._readable]
        return _TURN_SECONDS if this_rank().rank > min(alive, default=this_rank().rank) else 0.0

    def look(self, elapsed: float) -> str:
        """Look at all ranks, as the thread does every :data:`TICK_SECONDS`.

        Returns:
            The reason why this rank has to end the job; empty if its wait may go on.
        """
        own = this_rank()
        is_same_wait = own.waits and own.progress == self._progress
        self._progress = own.progress
        before, own.waited = own.waited, own.waited + elapsed if is_same_wait else 0.0
        own.beat = time.monotonic()
        self._messages.exchange(ask=own.signal != 0 or own.waited >= 2 * TICK_SECONDS)
        if self._another_rank_ends_the_job(elapsed):
            return ""
        if own.waited >= NOTICE_SECONDS > before:
            _print(f"{own}, for {own.waited:.0f} s now; timeout={self.timeout:g} s")
        if _is_idle(own) and all(peer.is_idle for peer in self._peers):
            return f"All ranks wait for one another, and none can go on. {_CAUSES}"
        if own.waited >= self.timeout:
            return (
                f"{own.who} has waited for {own.waited:.0f} s, longer than "
                f"timeout={self.timeout:g} s allows. If what it waits for takes that long, raise "
                "AxoSparseStrategy(timeout=...)."
            )
        return ""

    def _another_rank_ends_the_job(self, elapsed: float) -> bool:
        """If another rank is about to end the job, report this status, and let that rank end it."""
        if not self._another_alarms:
            return False
        if not this_rank().reported:
            _report("another rank ends the job")
            self._messages.exchange(ask=True)
        self._since_alarm += elapsed
        return self._since_alarm < 3 * ANSWER_SECONDS

    def _ask(self) -> str:
        """Ask the others to report their status; return a sentence on those that do not answer."""
        this_rank().alarm = True
        _report("it ends the job")
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(peer.answers for peer in self._peers):
            self._messages.exchange(ask=True)
            time.sleep(TICK_SECONDS / 10)
        silent = ", ".join(peer.name for peer in self._peers if not peer.answers)
        if not silent:
            return ""
        return (
            f" No answer from {silent}: killed, stopped, behind a dead link, or in native code "
            "that holds Python's lock."
        )

    def _end(self, reason: str) -> None:
        """Print and report the reason, with the status of each rank, and end the job."""
        link = see("failing-and-waiting-ranks")
        statuses = "".join(f"\n- {status}" for status in (this_rank(), *self._peers))
        message = reason + link + statuses
        _print(message)
        for report in before_abort:
            report(RanksStuckError(message))
        abort()


@cache  # One for each process, as a process is one rank.
def watchdog() -> Watchdog:
    """Return the watchdog of this process; the first call starts it, collective over the job."""
    world = MPI.COMM_WORLD
    path = publish(world.rank)
    places = world.allgather((socket.gethostname(), path, this_rank().token, this_rank().pid))
    peers = [Peer(rank, *place) for rank, place in enumerate(places) if rank != world.rank]
    if not before_abort:
        hold_files()
    started = Watchdog(peers, world.Dup())
    started.start()
    atexit.register(started.stop)
    return started


def _report(reason: str) -> None:
    """Print the status of this rank and the stacks of its threads."""
    _print(f"{this_rank()} ({reason})")
    faulthandler.dump_traceback(2)
    this_rank().reported = True


def _print(message: str) -> None:
    sys.stderr.write(f"[axosparse] {message}\n")
    sys.stderr.flush()
