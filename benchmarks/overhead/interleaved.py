"""Times several runners, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(
    runners: Mapping[str, Callable[[], object]],
    trials: int,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, float]:
    """Return the median seconds of each runner.

    Every runner has one warm-up run, and the order rotates from trial to trial.

    Args:
        runners: what to run, by name.
        trials: how often.
        clock: by default this thread's processor time, which does not count the time in which it
            waits for a core; what runs in several threads needs ``time.perf_counter``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-1, trials):
        turn = max(trial, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            runners[name]()
            if trial >= 0:
                seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
