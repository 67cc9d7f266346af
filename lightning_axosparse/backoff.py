"""Back-off: how a waiting rank polls at first and then gives up its core."""

from __future__ import annotations

import time

_POLLS = 20
_STEP = 20e-6
_LONGEST = 200e-6


class BackOff:
    """Pauses between polls: none for the first 20, then sleeps that grow from 20 to 200 us.

    MPI's own blocking waits spin, which starves the other ranks wherever there are more ranks than
    cores.
    """

    def __init__(self) -> None:
        self._polls = 0

    def pause(self) -> None:
        """Pause before the next poll."""
        self._polls += 1
        if self._polls > _POLLS:
            time.sleep(min(_LONGEST, _STEP * (self._polls - _POLLS)))

    def reset(self) -> None:
        """Begin anew, after a poll that found something."""
        self._polls = 0
