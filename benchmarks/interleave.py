"""Interleaved trials of several runners in one job, and their ratios to a baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

Runner = Callable[[int], None]
"""Runs one step of trial number ``trial`` on this rank."""


def trials(runners: Mapping[str, Runner], count: int) -> dict[str, list[float]]:
    """Return the seconds of each runner in each trial: those of the slowest rank.

    Every runner has one warm-up step, and the order rotates from trial to trial, so that a change
    of the machine's load affects all runners.
    """
    world = MPI.COMM_WORLD
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for trial in range(-1, count):
        rotated = names[trial % len(names) :] + names[: trial % len(names)]
        for name in rotated:
            world.Barrier()
            start = time.perf_counter()
            runners[name](max(trial, 0))
            elapsed = time.perf_counter() - start
            sleeping_barrier(world)
            slowest = world.allreduce(elapsed, op=MPI.MAX)
            if trial >= 0:
                seconds[name].append(slowest)
    return seconds


def sleeping_barrier(world: MPI.Comm) -> None:
    """Wait for all ranks without spinning: MPI's barrier would take the core of a busy rank."""
    barrier = world.Ibarrier()
    while not barrier.Test():
        time.sleep(500e-6)


def ratios(seconds: Mapping[str, list[float]], baseline: str) -> dict[str, float]:
    """Return each runner's ratio of medians to the baseline."""
    base = statistics.median(seconds[baseline])
    return {name: statistics.median(times) / base for name, times in seconds.items()}
