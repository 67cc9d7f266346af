"""Interleaved timing of several runners on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(runners: Mapping[str, Callable[[], object]], trials: int) -> dict[str, float]:
    """The median seconds of processor time that each runner takes on this thread.

    Every runner has one run to warm up, and the order turns from trial to trial. Processor time and
    not the wall clock's, so that waiting for a core is nobody's.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-1, trials):
        turn = max(trial, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            start = time.thread_time()
            runners[name]()
            if trial >= 0:
                seconds[name].append(time.thread_time() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
