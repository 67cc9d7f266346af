"""Times several runners on a device, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def median_seconds(
    runners: Mapping[str, Callable[[], object]], trials: int, device: torch.device, repeats: int = 1
) -> dict[str, float]:
    """Return the median seconds of each runner until the device has finished.

    Every runner has two warm-up runs, and the order rotates from trial to trial.

    Args:
        runners: the functions to time, by name.
        trials: number of timings of each.
        device: the device that they run on.
        repeats: runs per timing; more than one hides the host's time to start a run.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-2, trials):
        turn = max(trial, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            _finish(device)
            start = time.perf_counter()
            for _ in range(repeats):
                runners[name]()
            _finish(device)
            if trial >= 0:
                seconds[name].append((time.perf_counter() - start) / repeats)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
