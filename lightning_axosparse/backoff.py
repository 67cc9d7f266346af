"""Back-off: how a waiting rank polls at first and then gives up its core."""

from __future__ import annotations

import time

_POLLS = 20
_SHORTEST, _LONGEST = 20e-6, 1e-3
_SHARE = 0.05


class BackOff:
    """Pauses between polls: none for the first 20, then sleeps of a twentieth of the time waited.

    They are 20 us at least and a millisecond at most, so that what is waited too long is little of
    what was waited anyway. MPI's own blocking waits spin, and short sleeps take a tenth of a core,
    which starves the other ranks wherever there are more ranks than cores.
    """

    def __init__(self) -> None:
        self.reset()

    def pause(self) -> None:
        """Pause before the next poll."""
        self._polls += 1
        if self._polls > _POLLS:
            waited = time.monotonic() - self._since
            time.sleep(min(_LONGEST, max(_SHORTEST, _SHARE * waited)))

    def reset(self) -> None:
        """Begin anew, after a poll that found something."""
        self._polls = 0
        self._since = time.monotonic()
