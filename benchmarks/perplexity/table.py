"""Tables of the results: means over seeds with their spread, and comparisons seed by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import mean, stdev

from benchmarks.perplexity.arms import Dense, Pruned
from benchmarks.perplexity.job import Arm, Job
from benchmarks.perplexity.results import Line, Results
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


def finished(results: Results, task: Task, arm: Arm, seeds: Iterable[int]) -> dict[int, Line]:
    """Return the lines of the seeds whose jobs were finished."""
    found = {seed: results.of(Job(task, arm, seed)) for seed in seeds}
    return {seed: line for seed, line in found.items() if line is not None}


def compare(
    results: Results, task: Task, arms: Iterable[Arm], seeds: Sequence[int], key: str
) -> list[str]:
    """Return the lines of a Markdown table of arms, with ``key`` against dense and its control."""
    columns = ["arm", "seeds", "validation", "test", "to dense", "to its control"]
    columns += ["drawn at step", "stage 0 / 1"]
    rows = [f"| {' | '.join(columns)} |", f"| --- | --- {'| --: ' * (len(columns) - 2)}|"]
    dense = finished(results, task, Dense(), seeds)
    for arm in arms:
        lines = finished(results, task, arm, seeds)
        if not lines:
            continue
        control = finished(results, task, control_of(arm), seeds)
        compared = [against(lines, dense, key)]
        compared += [None if isinstance(arm, Dense) else against(lines, control, key)]
        cells = [label(arm), " ".join(map(str, lines))]
        cells += [
            Spread.of([line[column] for line in lines.values()]).shown(".2f")
            for column in ("validation", "test")
        ]
        cells += ["" if each is None else f"{each.shown('+.1f')} %" for each in compared]
        drawn = [str(line["draw_step"]) for line in lines.values() if line.get("draw_step")]
        cells += [", ".join(dict.fromkeys(drawn)), stages(list(lines.values()))]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def settled(results: Results, jobs: Iterable[Job]) -> list[str]:
    """Return the lines of a table: when masks are first closer than the default threshold."""
    lines = [line for line in map(results.of, jobs) if line is not None]
    rows = ["| learning rate | pruned | masks compared | below the threshold at | in the end |"]
    rows += ["| --: | --: | --: | --: | --: |"]
    for line in lines:
        for name, distances in line["distances"].items():
            ratio, count = float(name.split("/")[0]), int(name.split("/")[1])
            near = (place for place, d in enumerate(distances) if d < Pruned().threshold)
            first = next(near, None)
            when = "never" if first is None else f"{share_of_run(line, first, count):.0%}"
            cells = [f"{line['task']['learning_rate']:g}", f"{ratio:.0%}", f"{count} times", when]
            rows.append(f"| {' | '.join([*cells, f'{distances[-1]:.2f}'])} |")
    return rows


def share_of_run(line: Line, place: int, count: int) -> float:
    """Return when a distance was measured: the first one when the window was full."""
    window: int = line["arm"]["window"]
    return (place + window) / count


def stages(lines: Sequence[Line]) -> str:
    """Return the megabytes of the two stages' state, means over the seeds."""
    sizes = zip(*(line["stage_bytes"] for line in lines), strict=True)
    return " / ".join(f"{mean(size) / 1e6:.1f}" for size in sizes) + " MB"


def control_of(arm: Arm) -> Dense:
    """Return the dense arm with the learning rates of ``arm``."""
    return Dense(arm.factor, arm.draw_after) if isinstance(arm, Pruned) else Dense()


def label(arm: Arm) -> str:
    """Return what an arm is, and where it differs from the ticket by default."""
    if isinstance(arm, Dense):
        return "dense" if arm == Dense() else f"dense, rate x {arm.factor:g} from {arm.after:g}"
    standard = Pruned()
    changed = {
        field.name: getattr(arm, field.name)
        for field in fields(arm)
        if getattr(arm, field.name) != getattr(standard, field.name)
    }
    kind = changed.pop("masks", "ticket")
    return ", ".join([kind, *(f"{name} {value}" for name, value in changed.items())])
