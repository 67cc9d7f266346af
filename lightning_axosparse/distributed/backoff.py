"""Pauses between the polls of a waiting rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from lightning_axosparse.distributed.rank_status import this_rank

_POLLS = 20
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3
_SLEEP_FRACTION = 0.05


class BackOff:
    """Polls 20 times without a pause, then sleeps between polls for 5 % of the time waited so far.

    A sleep takes at least 20 us and at most a millisecond, so it prolongs a wait only a little.
    MPI's own blocking waits spin, and shorter sleeps take a tenth of a core; both slow down the
    other ranks where there are more ranks than cores.

    It is the context manager of a wait. The first sleep records the wait in the rank's status.

    Args:
        awaited: returns a description of what this rank waits for, and from which rank.
        bulk: whether that is so much data that their transfer may take long.
    """

    def __init__(self, awaited: Callable[[], str], bulk: bool = False) -> None:
        self._awaited, self._bulk = awaited, bulk
        self._recorded = False
        self._polls = 0
        self._since = time.monotonic()

    def __enter__(self) -> BackOff:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Start from the first poll again, after a poll that found something."""
        self._polls = 0
        self._since = time.monotonic()
        if self._recorded:
            this_rank().begin_wait(self._awaited(), self._bulk)
