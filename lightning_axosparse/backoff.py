"""Back-off: how a waiting rank polls at first and then gives up its core."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from lightning_axosparse.whereabouts import here

_POLLS = 20
_SHORTEST, _LONGEST = 20e-6, 1e-3
_SHARE = 0.05


class BackOff:
    """Pauses between polls: none for the first 20, then sleeps of a twentieth of the time waited.

    They are 20 us at least and a millisecond at most, so that what is waited too long is little of
    what was waited anyway. MPI's own blocking waits spin, and short sleeps take a tenth of a core,
    which starves the other ranks wherever there are more ranks than cores.

    It is the context of a wait, of which the watchdog learns with the first sleep.

    Args:
        awaited: says in words what is waited for and from whom.
        bulk: whether that is so much data that their transfer may take long.
    """

    def __init__(self, awaited: Callable[[], str], bulk: bool = False) -> None:
        self._awaited, self._bulk = awaited, bulk
        self._told = False
        self.reset()

    def __enter__(self) -> BackOff:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._told:
            here().end_wait()

    def pause(self) -> None:
        """Pause before the next poll."""
        self._polls += 1
        if self._polls > _POLLS:
            if not self._told:
                self._told = True
                here().begin_wait(self._awaited(), self._bulk)
            waited = time.monotonic() - self._since
            time.sleep(min(_LONGEST, max(_SHORTEST, _SHARE * waited)))

    def reset(self) -> None:
        """Begin anew, after a poll that found something."""
        self._polls = 0
        self._since = time.monotonic()
        if self._told:
            here().begin_wait(self._awaited(), self._bulk)
