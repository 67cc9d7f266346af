"""Interleaved trials of several runners in one job, and their ratios to a baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

Runner = Callable[[int], None]
"""Runs one step of trial number ``trial`` on this rank."""


def trials(runners: Mapping[str, Runner], count: int) -> dict[str, list[float]]:
    """Seconds of each runner in each trial: the slowest rank's, after a barrier.

    Every runner has one step to warm up, and the order turns from trial to trial, so that a change
    of the machine's load falls on all of them.
    """
    world = MPI.COMM_WORLD
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-1, count):
        turned = names[trial % len(names) :] + names[: trial % len(names)]
        for name in turned:
            world.Barrier()
            start = time.perf_counter()
            runners[name](max(trial, 0))
            elapsed = time.perf_counter() - start
            meet(world)
            slowest = world.allreduce(elapsed, op=MPI.MAX)
            if trial >= 0:
                seconds[name].append(slowest)
    return seconds


def meet(world: MPI.Comm) -> None:
    """Wait for the others asleep: MPI's barrier spins, and would take the core of one at work."""
    everyone = world.Ibarrier()
    while not everyone.Test():
        time.sleep(500e-6)


def ratios(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """The ratio of medians of each runner to the baseline."""
    base = statistics.median(seconds[baseline])
    return {name: statistics.median(times) / base for name, times in seconds.items()}
