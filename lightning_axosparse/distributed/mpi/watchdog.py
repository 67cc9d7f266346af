"""Watches ranks and the waits of this one in a thread, and ends the job when it cannot go on.

The watchdog reads the status of all ranks. It detects that a rank is gone or has received SIGTERM,
that all ranks wait for one another, and that some ranks have a batch more than others. It reads the
status of ranks on its node in shared memory; ranks of other nodes send theirs by MPI while a rank
waits, if MPI lets threads send. Where the reason is not certain, as in a long transfer between
nodes, ``timeout`` ends the wait.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from mpi4py import MPI

from lightning_axosparse.distributed.mpi.environment import SECONDS_TO_PRINT
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
"""After how many seconds of a wait a rank prints that it waits."""

DEADLOCK_SECONDS = NOTICE_SECONDS
"""For how many seconds all ranks only wait before the job is ended."""

TICK_SECONDS = min(1.0, NOTICE_SECONDS / 10)
"""How often a watchdog looks at the other ranks."""

ANSWER_SECONDS = 5 * TICK_SECONDS
"""For how many seconds a rank that ends the job waits for the answers of the others."""

MEETING_SECONDS = 2.0
"""For how many seconds after a SIGTERM the ranks may go on to where all can end together."""

_QUESTION, _ANSWER = range(2)  # tags
_NO_PROCESS = -1
_ABORT_SECONDS = 2  # after which a rank whose MPI cannot end the job ends itself
_TURN_SECONDS = 0.5  # for which other ranks let the first one of a node say what has happened

_HOST = socket.gethostname()
_CAUSES = (
    "Give every rank the same number of batches, let `on_train_batch_start` return -1 and "
    "`trainer.should_stop` be set on all ranks or none, and call `self.log(..., sync_dist=True)` "
    "and other collectives on all of them."
)

before_abort: list[Callable[[BaseException], None]] = []
"""Called with the reason before the watchdog of this process ends the job; the launcher's worker
adds a function that reports it to the caller, before there is a watchdog."""


class Peer:
    """What this rank knows of another rank, which is read by its path if a token confirms it."""

    def __init__(self, rank: int, host: str, path: str, token: int, pid: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on host {host}"
        self.status: RankStatus | None = None
        self.is_near = False
        """Whether its status is read in shared memory; else it is the last that it sent."""
        self.process = _NO_PROCESS
        """A file that can be read when its process has ended, if it is near."""
        self._progress = self._beat = -1
        self._idle = self._silent = 0.0
        try:
            status = read_status(path)
            if status.token == token:
                self.process, self.status, self.is_near = os.pidfd_open(pid), status, True
        except (OSError, ValueError, AttributeError):  # another host, or another system
            pass

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended and did not report why."""
        if self.status is None or not self.is_near or self.status.finished:
            return False
        return _can_be_read(self.process)

    @property
    def answers(self) -> bool:
        """Whether it has reported its status since it was asked."""
        return self.status is not None and bool(self.status.reported or self.status.finished)

    def update(self, elapsed: float) -> None:
        """Check whether it has done anything in the last ``elapsed`` seconds."""
        if self.status is not None:
            progress, beat = self.status.progress, self.status.beat
            waits = self.status.finished or (self.status.waits and not self.status.bulk)
            idle = progress == self._progress and waits
            self._idle = self._idle + elapsed if idle else 0.0
            self._silent = self._silent + elapsed if beat == self._beat else 0.0
            self._progress, self._beat = progress, beat

    @property
    def idle_seconds(self) -> float:
        """For how many seconds it is certain that it has only waited.

        A transfer between nodes may take long, and a stopped process only seems to wait.
        """
        return self._idle if self.is_near and self._silent <= 4 * TICK_SECONDS else 0.0

    def __str__(self) -> str:
        return f"{self.name}: not seen from {_HOST}" if self.status is None else str(self.status)


class StatusMessages:
    """Exchanges statuses by MPI between the watchdogs of different nodes.

    There are no peers where MPI does not let a thread send.
    """

    def __init__(self, comm: MPI.Intracomm, peers: Sequence[Peer]) -> None:
        self._comm = comm
        self._peers = {peer.rank: peer for peer in peers}
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def exchange(self, ask: bool) -> None:
        """Receive statuses, answer questions, and ask all peers if ``ask``."""
        if not self._peers:
            return
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            data = bytearray(ctypes.sizeof(RankStatus))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv([data, MPI.BYTE], source, tag)
            self._peers[source].status = RankStatus.from_buffer(data)
            if tag == _QUESTION and not ask:
                self._send(source, _ANSWER)
        # Messages are never sent on a dead link, and their number must not grow.
        self._sent = [(request, data) for request, data in self._sent if not request.Test()]
        if ask and len(self._sent) < 4 * len(self._peers):
            for rank in self._peers:
                self._send(rank, _QUESTION)

    def _send(self, rank: int, tag: int) -> None:
        data = bytes(this_rank())
        self._sent.append((self._comm.Isend([data, MPI.BYTE], rank, tag), data))


class Wakeup:
    """Sleeps until a signal arrives, one of some processes ends, or some time has passed."""

    def __init__(self, processes: Iterable[int] = ()) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._poll = select.poll()
        for file in (self._reads, *processes):
            if file != _NO_PROCESS:
                self._poll.register(file, select.POLLIN)

    def sleep(self, seconds: float) -> bytes:
        """Sleep for so long at most; return the numbers of the signals that have arrived."""
        signals = b""
        for file, _ in self._poll.poll(1000 * seconds):
            if file == self._reads:
                signals = os.read(self._reads, 4096)
            else:
                self._poll.unregister(file)  # It can be read from now on.
        return signals

    def wake(self) -> None:
        """End the sleep of another thread."""
        os.write(self._writes, b"\0")

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """Inside the context signals that have a handler end the sleep.

        The main thread runs no handler during a long call of native code, as a backward pass is.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)


def _leave_signals_to_parent() -> None:
    """Keep a process that was forked from writing its own signals into the parent's pipe."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_signals_to_parent)


class Watchdog:
    """Ends the job when this rank waits for something that cannot happen, or for too long."""

    def __init__(self, peers: Sequence[Peer], messages: StatusMessages) -> None:
        self.timeout = float("inf")
        self._peers, self._messages = peers, messages
        self._progress = -1
        self._waited = self._since_alarm = 0.0
        self._sigterm_seen: float | None = None
        self._proxy = _NO_PROCESS
        if this_rank().proxy:
            self._proxy = os.pidfd_open(this_rank().proxy)
        self.wakeup = Wakeup([self._proxy, *(peer.process for peer in peers)])
        self._over = False
        self._thread = threading.Thread(target=self._run, name="axosparse-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; it runs until this process ends."""
        self._thread.start()
        atexit.register(self._stop)

    def received(self) -> RankStatus | None:
        """The status of a rank that has received a signal, with SIGTERM before any other."""
        ranks = [rank for rank in (this_rank(), *self._statuses) if rank.signal]
        return max(ranks, key=lambda rank: rank.signal == signal.SIGTERM, default=None)

    @property
    def _statuses(self) -> list[RankStatus]:
        return [peer.status for peer in self._peers if peer.status is not None]

    def _stop(self) -> None:
        self._over = True
        self.wakeup.wake()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over:
            hurries = self._sigterm_seen is not None
            signals = self.wakeup.sleep(TICK_SECONDS / 10 if hurries else TICK_SECONDS)
            if signal.SIGTERM in signals:
                this_rank().signal = signal.SIGTERM
                self._messages.exchange(ask=True)
            if _can_be_read(self._proxy):
                os._exit(1)  # mpiexec's proxy was killed, and no output of its ranks is read.
            now = time.monotonic()
            cause = self._cause(now)
            if cause:
                self._end_for(cause)
            # During a longer time this process was stopped; that is no wait.
            reason = self.look(min(now - before, 2 * TICK_SECONDS))
            if reason:
                self._end(reason)
            before = now

    def _cause(self, now: float) -> str:
        """What has happened that ends the job, also if this rank does not wait; or empty."""
        lost = [peer.status for peer in self._peers if peer.status and peer.is_gone]
        # The launcher itself detects which of its ranks was lost first.
        at_once = not before_abort and any(rank.running for rank in lost)
        if lost and (at_once or self._waited >= 2 * TICK_SECONDS):
            return "\n".join(
                f"{rank.who} {describe_end(exit_code(rank.pid))} It was {rank.doing}."
                for rank in lost
            )
        received = self.received()
        if received is None or received.signal != signal.SIGTERM or this_rank().leaves:
            self._sigterm_seen = None
            return ""
        self._sigterm_seen = self._sigterm_seen or now
        if now - self._sigterm_seen < MEETING_SECONDS:
            return ""
        return f"{received.who} received SIGTERM, which ends the job. It was {received.doing}."

    def _end_for(self, cause: str) -> None:
        """End the job for what is certain: without the stacks and the answers of other ranks."""
        near = [peer.rank for peer in self._peers if peer.is_near and not peer.is_gone]
        is_first = this_rank().rank <= min(near, default=this_rank().rank)
        if not is_first:
            time.sleep(_TURN_SECONDS)  # as a rule, the first one ends the job meanwhile
        self._abort(cause)

    def look(self, elapsed: float) -> str:
        """Look at all ranks, as the thread does every :data:`TICK_SECONDS`.

        Returns:
            Why this rank has to end the job; empty if its wait may go on.
        """
        this_rank().beat += 1
        self._messages.exchange(ask=self._waited >= 2 * TICK_SECONDS)
        self._count(elapsed)
        if self._another_rank_ends_the_job(elapsed):
            return ""
        if self._waited >= NOTICE_SECONDS > self._waited - elapsed:
            _say(f"{this_rank()}, for {self._waited:.0f} s now; timeout={self.timeout:g} s")
        return self._reason() if self._waited else ""

    def _count(self, elapsed: float) -> None:
        """Update for how long this rank has waited, and while it waits each other rank."""
        same = this_rank().waits and this_rank().progress == self._progress
        self._progress = this_rank().progress
        self._waited = self._waited + elapsed if same else 0.0
        for peer in self._peers if same else ():
            peer.update(elapsed)

    def _another_rank_ends_the_job(self, elapsed: float) -> bool:
        """If another rank is about to end the job, report this status, and let that rank end it."""
        if not any(status.alarm for status in self._statuses):
            return False
        if not this_rank().reported:
            _report("another rank ends the job")
            self._messages.exchange(ask=True)
        self._since_alarm += elapsed
        return self._since_alarm < 3 * ANSWER_SECONDS

    def _reason(self) -> str:
        """Why the wait has to end; empty if it may go on."""
        if any(have_unequal_batches(this_rank(), status) for status in self._statuses):
            return f"The ranks have unequal numbers of batches. {_CAUSES}"
        idle = 0.0 if this_rank().bulk else self._waited
        if min(idle, *(peer.idle_seconds for peer in self._peers)) >= DEADLOCK_SECONDS:
            return f"All ranks wait for one another, and none can go on. {_CAUSES}"
        if self._waited >= self.timeout:
            return (
                f"{this_rank().who} has waited for {self._waited:.0f} s, longer than timeout="
                f"{self.timeout:g} s allows. If what it waits for takes that long, raise "
                "AxoSparseStrategy(timeout=...)."
            )
        return ""

    def _end(self, reason: str) -> None:
        """Ask the others for their status, print and report all of them, and end the job."""
        this_rank().alarm = True
        _report("it ends the job")
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and not all(peer.answers for peer in self._peers):
            self._messages.exchange(ask=True)
            time.sleep(TICK_SECONDS / 10)
        silent = [peer.name for peer in self._peers if not peer.answers]
        if silent:
            reason += (
                f" No answer from {', '.join(silent)}: killed, stopped, behind a dead link, or in "
                "native code that holds Python's lock."
            )
        self._abort(reason)

    def _abort(self, reason: str) -> None:
        """Print and report the reason, with the status of each rank, and end the job."""
        link = see("failing-and-waiting-ranks")
        everyone = "".join(f"\n- {status}" for status in (this_rank(), *self._peers))
        message = reason + link + everyone
        _say(message)
        for report in before_abort:
            report(RanksStuckError(message))
        abort()


def have_unequal_batches(one: RankStatus, other: RankStatus) -> bool:
    """Whether one of two ranks in the same loop has ended it, and the other has one more batch."""
    if (one.loop, one.epoch) != (other.loop, other.epoch) or one.ended == other.ended:
        return False
    if one.evaluation_group != other.evaluation_group and one.loop != b"training":
        return False  # Replicas may evaluate different numbers of batches.
    over, under_way = (one, other) if one.ended else (other, one)
    return bool(under_way.in_step and under_way.batch > over.batch)


@cache  # One for each process, as a process is one rank.
def watchdog() -> Watchdog:
    """The watchdog of this process; the first call is collective over the job, and starts it."""
    world = MPI.COMM_WORLD
    path = publish(world.rank)
    found = world.allgather((_HOST, path, this_rank().token, this_rank().pid))
    peers = [Peer(rank, *where) for rank, where in enumerate(found) if rank != world.rank]
    lets_threads_send = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    far = [peer for peer in peers if lets_threads_send and not peer.is_near]
    started = Watchdog(peers, StatusMessages(world.Dup(), far))
    near = [world.rank, *(peer.rank for peer in peers if peer.is_near)]
    for file in [] if before_abort else hold_files(sorted(near)):
        atexit.register(os.close, file)
    started.start()
    return started


def abort() -> None:
    """End all ranks of the job, or this one if MPI cannot."""
    time.sleep(SECONDS_TO_PRINT)
    last_resort = threading.Timer(_ABORT_SECONDS, os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    MPI.COMM_WORLD.Abort(1)


def _can_be_read(file: int) -> bool:
    poll = select.poll()
    if file != _NO_PROCESS:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _report(why: str) -> None:
    """Print the status of this rank and the stacks of its threads, the main one last."""
    main, me = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    stacks = [
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames
        if number != me
    ]
    _say(f"{this_rank()} ({why})\n{''.join(stacks)}")
    this_rank().reported = True


def _say(message: str) -> None:
    sys.stderr.write(f"[axosparse] {message}\n")
    sys.stderr.flush()
