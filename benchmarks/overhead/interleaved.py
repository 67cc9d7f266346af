"""Times several runners on one thread, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(runners: Mapping[str, Callable[[], object]], trials: int) -> dict[str, float]:
    """Return the median seconds of this thread's processor time of each runner.

    Every runner has one warm-up run, and the order rotates from trial to trial. Processor time does
    not count the time in which the thread waits for a core.
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
