"""Tables of the results: means over seeds with their spread, compared seed by seed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from benchmarks.perplexity.arms import Arm
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.results import Line
from benchmarks.perplexity.tasks import Task


@dataclass(frozen=True)
class Spread:
    """The mean of some values and their standard deviation; None of fewer than two values."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(mean(values), stdev(values) if len(values) > 1 else None)

    def shown(self, pattern: str) -> str:
        """Return "mean ± deviation", each by a format such as "+.1f"."""
        if self.deviation is None:
            return format(self.mean, pattern)
        return f"{self.mean:{pattern}} ± {self.deviation:{pattern.lstrip('+')}}"


@dataclass(frozen=True)
class Comparison:
    """A table: arms on some seeds, each of one or several tasks, against the first of them.

    Attributes:
        title: what is compared.
        arms: the arms with their tasks; the first is what the others are compared with.
        seeds: of each arm.
        key: by which number arms are compared: "validation" chooses, "test" reports.
    """

    title: str
    arms: tuple[tuple[Task, Arm], ...]
    seeds: tuple[int, ...]
    key: str

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the table, seed by seed."""
        return [Job(task, arm, seed) for seed in self.seeds for task, arm in self.arms]

    def rows(self, results: Mapping[Job, Line]) -> list[str]:
        """Return the lines of a Markdown table, as far as the jobs were finished."""
        columns = ["task", "arm", "seeds", "tokens per parameter", "validation", "test"]
        columns += ["to the first", "state", "CPU seconds"]
        rows = [f"| {' | '.join(columns)} |", f"| --- | --- | --- {'| --: ' * 6}|"]
        first: dict[int, Line] = {}
        for task, arm in self.arms:
            found = {seed: results.get(Job(task, arm, seed)) for seed in self.seeds}
            lines = {seed: line for seed, line in found.items() if line is not None}
            first = first or lines
            if lines:
                rows.append(f"| {' | '.join(self._cells(task, arm, lines, first))} |")
        return rows

    def _cells(
        self, task: Task, arm: Arm, lines: Mapping[int, Line], first: Mapping[int, Line]
    ) -> list[str]:
        def column(name: str, pattern: str) -> str:
            return Spread.of([line[name] for line in lines.values()]).shown(pattern)

        compared = against(lines, first, self.key)
        return [
            task.name,
            arm.label,
            seeds_shown(lines),
            format(mean(line["tokens_a_parameter"] for line in lines.values()), ".3g"),
            column("validation", ".3f"),
            column("test", ".3f"),
            "" if compared is None or lines == first else f"{compared.shown('+.1f')} %",
            f"{mean(line['state_bytes'] for line in lines.values()) / 1e6:.2f} MB",
            format(mean(line["seconds"] for line in lines.values()), ".0f"),
        ]


def against(lines: Mapping[int, Line], others: Mapping[int, Line], key: str) -> Spread | None:
    """Return by how many percent ``lines`` are above ``others``, over the seeds of both.

    Args:
        lines: seed -> line.
        others: likewise.
        key: "validation" or "test".
    """
    seeds = sorted(lines.keys() & others.keys())
    if not seeds:
        return None
    return Spread.of([100 * (lines[seed][key] / others[seed][key] - 1) for seed in seeds])


def seeds_shown(seeds: Collection[int]) -> str:
    return " ".join(map(str, sorted(seeds)))


def settled(results: Mapping[Job, Line], threshold: float = 0.5) -> list[str]:
    """Return the lines of a table: when the masks of dense runs settle, as shares of the run.

    Args:
        results: the lines of the jobs.
        threshold: the largest distance of masks that have settled.
    """
    rows = ["| task | arm | seed | settled at |", "| --- | --- | --: | --: |"]
    for job, line in results.items():
        near = [int(step) for step, d in line.get("distances", {}).items() if d < threshold]
        if not job.arm.changes and near:
            share = min(near) / job.task.all_steps
            rows.append(f"| {job.task.name} | {job.arm.label} | {job.seed} | {share:.0%} |")
    return rows
