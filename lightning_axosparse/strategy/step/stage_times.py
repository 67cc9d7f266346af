"""Measures how unequally long the stages compute in the first batches, and says it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.support.messages import rank_zero_info
from lightning_axosparse.support.trace import clock

_WARM_UP, _BATCHES = 1, 3
_UNEQUAL = 1.3
"""Times the mean stage's time from which on the slowest stage is named."""


class StageTimes:
    """The time for which this rank's stage computes in the first batches.

    Args:
        group: the stages of the pipeline; None: nothing is compared.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._seconds = group, list[float]()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Measure a training batch; after the last one that is measured, compare; collective."""
        began = _computed()
        yield
        if self._group is not None and len(self._seconds) < _WARM_UP + _BATCHES:
            self._seconds.append(_computed() - began)
            if len(self._seconds) == _WARM_UP + _BATCHES:
                mean = sum(self._seconds[_WARM_UP:]) / _BATCHES
                _say(all_gather(mean, self._group))


def _computed() -> float:
    return clock.totals["forward"] + clock.totals["backward"] + clock.totals["weight gradient"]


def _say(seconds: Sequence[float]) -> None:
    slowest, mean = max(seconds), sum(seconds) / len(seconds)
    if slowest > _UNEQUAL * mean:
        rank_zero_info(
            f"Stage {seconds.index(slowest)} computes {slowest / mean:.1f} times as long as the "
            f"mean stage: {', '.join(f'{1e3 * s:,.0f}' for s in seconds)} ms of a batch by stage. "
            "Try balance='time', or balance=[...] with the layers of each stage."
        )
