"""Groups the finished jobs of a sweep into the points of its curves: an arm at a ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from lightning_axosparse.callbacks.report.result import RunResult
from lightning_axosparse.cli.sweep.job import Job

Number = Callable[[RunResult], float | None]


@dataclass(frozen=True)
class Measure:
    """A number of a run that the curves show: its name with its unit, and how it is shown."""

    name: str
    number: Number
    format: str = "{:.3f}"


@dataclass(frozen=True)
class Point:
    """The finished jobs of one arm at one ratio, which differ in their seeds.

    Attributes:
        label: the arm, and other overrides in which the jobs of the sweep differ.
        ratio: None if the arm is the same at all ratios.
        variant: the one of the arm's variants that is best in validation.
        jobs: its finished jobs, in the order of their seeds.
    """

    label: str
    ratio: float | None
    variant: str
    jobs: Sequence[Job]

    def values(self, number: Number) -> list[float]:
        """Return a number of all jobs that have it."""
        found = [number(job.result) for job in self.jobs if job.result is not None]
        return [value for value in found if value is not None]

    def against(self, other: Point | None, number: Number) -> float | None:
        """Return by which fraction a number exceeds the other point's, on average over seeds."""
        if other is None:
            return None
        theirs = {job.seed: number(job.result) for job in other.jobs if job.result is not None}
        ratios = []
        for job in self.jobs:
            own = None if job.result is None else number(job.result)
            if own is not None and (base := theirs.get(job.seed)):
                ratios.append(own / base - 1)
        return mean(ratios) if ratios else None


def largest_state(result: RunResult) -> float | None:
    """The model state of the rank that holds most, in MB."""
    return max(result.state_bytes[result.period], default=0) / 1e6


def largest_reduced(result: RunResult) -> float | None:
    """What the rank that sends most all-reduces in a step, in MB."""
    return max(result.reduced_bytes[result.period], default=0) / 1e6


def step_time(result: RunResult) -> float | None:
    """The mean step over all ranks, in ms."""
    return 1e3 * mean(result.step_seconds[result.period])


TEST = Measure("test perplexity", lambda result: result.test_perplexity)
VALIDATION = Measure("validation perplexity", lambda result: result.validation_perplexity)
STATE = Measure("model state of the largest rank (MB)", largest_state, "{:.2f}")
REDUCED = Measure("all-reduced per step (MB)", largest_reduced, "{:.2f}")
STEP = Measure("step (ms)", step_time, "{:.1f}")
DRAW = Measure("ticket drawn after (steps)", lambda result: result.draw_step, "{:.0f}")


def points(jobs: Sequence[Job]) -> list[Point]:
    """Group finished jobs by arm and ratio; of an arm's variants the best in validation counts."""
    others = varying(jobs)
    groups: dict[tuple[str, float | None], dict[str, list[Job]]] = {}
    for job in jobs:
        if job.result is not None:
            label = ", ".join([job.arm, *(f"{k}={v}" for k, v in chosen(job, others).items())])
            groups.setdefault((label, job.ratio), {}).setdefault(job.variant, []).append(job)
    found = []
    for (label, ratio), variants in groups.items():
        candidates = [
            Point(label, ratio, variant, sorted(group, key=lambda job: job.seed))
            for variant, group in variants.items()
        ]
        found.append(min(candidates, key=_quality))
    return sorted(found, key=lambda point: (point.label, point.ratio or 0))


def varying(jobs: Sequence[Job]) -> list[str]:
    """Return the keys, beside arm, ratio and seed, in whose overrides the jobs differ."""
    tables = [_table(job) for job in jobs]
    keys = {key: None for table in tables for key in table}
    return [
        key
        for key in keys
        if key not in ("arm", "seed", "pruning.ratio")
        and len({table.get(key) for table in tables}) > 1
    ]


def chosen(job: Job, keys: Sequence[str]) -> dict[str, str]:
    """Return the job's overrides of these keys."""
    table = _table(job)
    return {key: table[key] for key in keys if key in table}


def _table(job: Job) -> dict[str, str]:
    pairs = (override.partition("=") for override in job.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _quality(point: Point) -> tuple[int, float]:
    """The more seeds the better, then the lower the better."""
    values = point.values(VALIDATION.number)
    return -len(values), mean(values) if values else 0.0
