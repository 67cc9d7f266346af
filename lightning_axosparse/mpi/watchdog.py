"""Watchdog: a thread of each rank that ends the job when a wait has no end, and says why.

It knows the whereabouts of all ranks, and by them when a rank is gone, when all wait for one
another, and when some have a batch more than others. Those of its node it reads in their memory;
those of other nodes are sent by MPI while a rank waits, if MPI lets threads send. Whatever it
cannot be sure of, such as a transfer between nodes that takes long, ends by ``timeout``.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache

from mpi4py import MPI

from lightning_axosparse.whereabouts import RanksStuckError, Whereabouts, here, publish, read

NOTICE_SECONDS = float(os.environ.get("AXOSPARSE_NOTICE_SECONDS", 30))
"""How long a wait lasts until the rank says that it waits."""

_STANDSTILL = NOTICE_SECONDS  # for which all ranks do nothing but wait, until that is the end
_TICK = min(1.0, NOTICE_SECONDS / 10)
_GRACE = 5 * _TICK  # for the others' answers
_ASK, _TELL = range(2)  # tags
_ABORT_SECONDS = 5  # until a rank whose MPI cannot end the job ends at least itself

_HOST = socket.gethostname()
_CAUSES = (
    "Give every rank the same number of batches, let `on_train_batch_start` return -1 and "
    "`trainer.should_stop` be set on all ranks or none, and call `self.log(..., sync_dist=True)` "
    "and other collectives on all of them."
)


told: list[Callable[[BaseException], None]] = []
"""Called with the reason before the watchdog ends the job: a launched rank leaves a file."""


class Peer:
    """Another rank, as far as this one can see it.

    Args:
        rank: its number.
        host: of its process.
        path: where its whereabouts can be read on that host; empty for nowhere.
        token: by which they are known.
        pid: of its process.
    """

    def __init__(self, rank: int, host: str, path: str, token: int, pid: int) -> None:
        self.rank = rank
        self.name = f"rank {rank} on host {host}"
        self.row: Whereabouts | None = None
        self.is_near = False
        """Whether its whereabouts are those of now, and not those that it has last told of."""
        self._process = -1
        self._progress = self._beat = -1
        self._rested = self._silent = 0.0
        try:
            row = read(path)
            if row.token == token:
                self._process, self.row, self.is_near = os.pidfd_open(pid), row, True
        except (OSError, ValueError, AttributeError):  # another host, or another system
            pass

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended without leaving word."""
        if self.row is None or not self.is_near or self.row.left:
            return False
        return bool(select.select([self._process], [], [], 0)[0])

    @property
    def answers(self) -> bool:
        """Whether it has told where it is since it was asked."""
        return self.row is not None and bool(self.row.reported or self.row.left)

    def look(self, elapsed: float) -> None:
        """See whether it has done anything in the time that has elapsed."""
        if self.row is not None:
            progress, beat = self.row.progress, self.row.beat
            waits = self.row.left or (self.row.waits and not self.row.bulk)
            rests = progress == self._progress and waits
            self._rested = self._rested + elapsed if rests else 0.0
            self._silent = self._silent + elapsed if beat == self._beat else 0.0
            self._progress, self._beat = progress, beat

    @property
    def rested(self) -> float:
        """For how many seconds it has surely done nothing but wait.

        What is on its way between nodes may take long, and a stopped process only seems to wait.
        """
        return self._rested if self.is_near and self._silent <= 4 * _TICK else 0.0

    def __str__(self) -> str:
        return f"{self.name}: not seen from {_HOST}" if self.row is None else str(self.row)


class Mail:
    """The whereabouts of ranks of other nodes, by MPI and from thread to thread.

    Args:
        comm: communicator used by nobody else.
        peers: those ranks; none where MPI does not let a thread send.
    """

    def __init__(self, comm: MPI.Intracomm, peers: Sequence[Peer]) -> None:
        self._comm = comm
        self._peers = {peer.rank: peer for peer in peers}
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def exchange(self, ask: bool) -> None:
        """Take in what has come, answer who asks, and if need be ask everybody."""
        if not self._peers:
            return
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            letter = bytearray(ctypes.sizeof(Whereabouts))
            source, tag = status.Get_source(), status.Get_tag()
            self._comm.Recv([letter, MPI.BYTE], source, tag)
            self._peers[source].row = Whereabouts.from_buffer(letter)
            if tag == _ASK and not ask:
                self._send(source, _TELL)
        # Behind a dead link messages do not leave, and should not pile up.
        self._sent = [(request, letter) for request, letter in self._sent if not request.Test()]
        if ask and len(self._sent) < 4 * len(self._peers):
            for rank in self._peers:
                self._send(rank, _ASK)

    def _send(self, rank: int, tag: int) -> None:
        letter = bytes(here())
        self._sent.append((self._comm.Isend([letter, MPI.BYTE], rank, tag), letter))


class Watchdog:
    """Watches the waits of this rank.

    Args:
        peers: the other ranks of the job.
        mail: to and from those of other nodes.
    """

    def __init__(self, peers: Sequence[Peer], mail: Mail) -> None:
        self.timeout = float("inf")
        self._peers, self._mail = peers, mail
        self._progress = -1
        self._waited = self._asked = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="axosparse-watchdog", daemon=True)

    def start(self) -> None:
        """Watch, until this process ends."""
        self._thread.start()
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_TICK):
            now = time.monotonic()
            # What is more this process has spent stopped, and not waiting.
            self._tick(min(now - before, 2 * _TICK))
            before = now

    def _tick(self, elapsed: float) -> None:
        here().beat += 1
        self._mail.exchange(ask=self._waited >= 2 * _TICK)
        self._count(elapsed)
        if self._is_asked(elapsed):
            return
        if self._waited >= NOTICE_SECONDS > self._waited - elapsed:
            _say(f"{here()}, for {self._waited:.0f} s now; timeout={self.timeout:g} s")
        reason = self._reason() if self._waited else ""
        if reason:
            self._end(reason)

    def _count(self, elapsed: float) -> None:
        """Count for how long this rank, and while it waits each other, does nothing but wait."""
        same = here().waits and here().progress == self._progress
        self._progress = here().progress
        self._waited = self._waited + elapsed if same else 0.0
        for peer in self._peers if same else ():
            peer.look(elapsed)

    def _is_asked(self, elapsed: float) -> bool:
        """Tell where this rank is if another gives up waiting, and leave the end to it."""
        if not any(peer.row is not None and peer.row.alarm for peer in self._peers):
            return False
        if not here().reported:
            _report("another rank gives up waiting")
            self._mail.exchange(ask=True)
        self._asked += elapsed
        return self._asked < 3 * _GRACE

    def _reason(self) -> str:
        """Why to wait no longer; empty to go on."""
        rows = [peer.row for peer in self._peers if peer.row is not None]
        gone = [peer.row.who for peer in self._peers if peer.row is not None and peer.is_gone]
        if gone and self._waited >= 2 * _TICK:
            return f"{' and '.join(gone)} ended without a word: killed, or by `os._exit`."
        if any(are_apart(here(), row) for row in rows):
            return f"The ranks have unequal numbers of batches. {_CAUSES}"
        still = 0.0 if here().bulk else self._waited
        if min(still, *(peer.rested for peer in self._peers)) >= _STANDSTILL:
            return f"All ranks wait for one another, and none can go on. {_CAUSES}"
        if self._waited >= self.timeout:
            return (
                f"{here().who} has waited for {self._waited:.0f} s, longer than timeout="
                f"{self.timeout:g} s allows. If what it waits for takes that long, raise "
                "AxoSparseStrategy(timeout=...)."
            )
        return ""

    def _end(self, reason: str) -> None:
        """Hear where the others are, leave word, and end the job."""
        here().alarm = True
        _report("it gives up waiting")
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not all(peer.answers for peer in self._peers):
            self._mail.exchange(ask=True)
            time.sleep(_TICK / 10)
        silent = [peer.name for peer in self._peers if not peer.answers]
        words = reason
        if silent:
            words += (
                f" No answer from {', '.join(silent)}: killed, stopped, behind a dead link, or in "
                "native code that holds Python's lock."
            )
        words += "".join(f"\n- {place}" for place in (here(), *self._peers))
        _say(words)
        for tell in told:
            tell(RanksStuckError(words))
        abort()


def are_apart(one: Whereabouts, other: Whereabouts) -> bool:
    """Whether two ranks are in one loop, which is over on one, with a batch more on the other."""
    if (one.loop, one.epoch) != (other.loop, other.epoch) or one.ended == other.ended:
        return False
    if one.feed != other.feed and one.loop != b"training":
        return False  # Replicas evaluate apart from each other.
    over, under_way = (one, other) if one.ended else (other, one)
    return bool(under_way.in_step and under_way.batch > over.batch)


@cache
def watchdog() -> Watchdog:
    """The watchdog of this process; the first call is collective over the job, and starts it."""
    world = MPI.COMM_WORLD
    path = publish(world.rank)
    offers = world.allgather((_HOST, path, here().token, here().pid))
    peers = [Peer(rank, *offer) for rank, offer in enumerate(offers) if rank != world.rank]
    lets_threads_send = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    far = [peer for peer in peers if lets_threads_send and not peer.is_near]
    dog = Watchdog(peers, Mail(world.Dup(), far))
    dog.start()
    return dog


def abort() -> None:
    """End all ranks of the job, or, if MPI cannot, this one."""
    last_resort = threading.Timer(_ABORT_SECONDS, os._exit, [1])
    last_resort.daemon = True
    last_resort.start()
    MPI.COMM_WORLD.Abort(1)


def _report(why: str) -> None:
    """Print where this rank is, and the stacks of its threads, the main one last."""
    main, me = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == main)
    stacks = [
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in frames
        if number != me
    ]
    _say(f"{here()} ({why})\n{''.join(stacks)}")
    here().reported = True


def _say(words: str) -> None:
    sys.stderr.write(f"[axosparse] {words}\n")
    sys.stderr.flush()
