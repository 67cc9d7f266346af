"""Watchdog: a thread of each rank that ends the job when a wait has no end, and says why.

It reads the whereabouts of the ranks of its node, which tell it when a rank is gone, when all of
them wait for one another, and when ranks have gone separate ways. Ranks of other nodes it cannot
see: there each rank has its own ``timeout`` to go by.
"""

from __future__ import annotations

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

_STANDSTILL = NOTICE_SECONDS / 3  # seconds in which not one of all ranks does anything but wait
_TICK = min(1.0, NOTICE_SECONDS / 10)
_GRACE = 5 * _TICK  # for the others' answers
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
        self.row: Whereabouts | None = None
        self.name = f"rank {rank} on host {host}"
        self._process = -1
        try:
            row = read(path)
            if row.token == token:
                self._process, self.row = os.pidfd_open(pid), row
        except (OSError, ValueError, AttributeError):  # another host, or another system
            pass

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended without leaving word."""
        if self.row is None or self.row.left:
            return False
        return bool(select.select([self._process], [], [], 0)[0])

    @property
    def answers(self) -> bool:
        """Whether it has told where it is since it was asked."""
        return self.row is not None and bool(self.row.reported or self.row.left)

    def __str__(self) -> str:
        return f"{self.name}: not seen from {_HOST}" if self.row is None else str(self.row)


class Watchdog:
    """Watches the waits of this rank.

    Args:
        peers: the other ranks of the job.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self.timeout = float("inf")
        self._peers = peers
        self._rows = [peer.row for peer in peers if peer.row is not None]
        self._progress: list[int] = []
        self._waited = self._all_waited = self._asked = 0.0

    def run(self) -> None:
        """Watch, for as long as this process lives."""
        before = time.monotonic()
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            # What is more this process has spent stopped, and not waiting.
            self._tick(min(now - before, 2 * _TICK))
            before = now

    def _tick(self, elapsed: float) -> None:
        if any(row.alarm for row in self._rows):
            self._asked += elapsed
            if not here().reported:
                _report("another rank gives up waiting")
            if self._asked < 3 * _GRACE:  # The one that asks will end the job.
                return
        noticed = self._waited >= NOTICE_SECONDS
        self._count(elapsed)
        if self._waited >= NOTICE_SECONDS and not noticed:
            _say(f"{here()}, for {self._waited:.0f} s now; timeout={self.timeout:g} s")
        reason = self._reason() if self._waited else ""
        if reason:
            self._end(reason)

    def _count(self, elapsed: float) -> None:
        """Count for how long this rank, and all ranks, have done nothing but wait."""
        rows = [here(), *self._rows]
        before, self._progress = self._progress, [row.progress for row in rows]
        same = [old == new for old, new in zip(before, self._progress, strict=False)] or [False]
        self._waited = self._waited + elapsed if here().waits and same[0] else 0.0
        wait = all(same) and all(row.waits or row.left for row in rows)
        self._all_waited = self._all_waited + elapsed if wait else 0.0

    def _reason(self) -> str:
        """Why to wait no longer; empty to go on."""
        gone = [peer.row.who for peer in self._peers if peer.row is not None and peer.is_gone]
        if gone and self._waited >= 2 * _TICK:
            return f"{' and '.join(gone)} ended without a word: killed, or by `os._exit`."
        if any(are_apart(here(), row) for row in self._rows):
            return f"The ranks have unequal numbers of batches. {_CAUSES}"
        if len(self._rows) == len(self._peers) and self._all_waited >= _STANDSTILL:
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
    dog = Watchdog(peers)
    threading.Thread(target=dog.run, name="axosparse-watchdog", daemon=True).start()
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
