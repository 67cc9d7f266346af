"""Writes the report of all jobs of a sweep: the command ``axosparse-sweep``.

Finished jobs of the same arm and ratio are grouped into points of tables and curves.
"""

from __future__ import annotations

import csv
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from axosparse_commands.arguments import sweep_parser
from lightning_axosparse.callbacks.report.facts import RunResult, too_short
from lightning_axosparse.callbacks.report.tables import Section
from lightning_axosparse.callbacks.ticket_callback import Period
from lightning_axosparse.cli.job import Job, command, error_message, jobs_in
from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, object]


@dataclass(frozen=True)
class Measure:
    """A number of a run in the report: its name with its unit, its value and its format."""

    name: str
    number: Callable[[RunResult], float | None]
    format: str = "{:.3f}"


def _megabytes(size: int | None) -> float | None:
    return None if size is None else size / 1e6


TEST_PERPLEXITY = Measure("test perplexity", lambda result: result.test_perplexity)
CURVES = {
    "perplexity": TEST_PERPLEXITY,
    "memory": Measure(
        "model state of the largest rank (MB)",
        lambda result: _megabytes(result.largest_state_bytes),
        "{:.2f}",
    ),
    "all_reduce": Measure(
        "all-reduced per step (MB)",
        lambda result: _megabytes(result.largest_reduced_bytes),
        "{:.2f}",
    ),
    "step_time": Measure(
        "step (ms)", lambda result: result.step_milliseconds(result.period), "{:.1f}"
    ),
    "draw_step": Measure("ticket drawn after (steps)", lambda result: result.draw_step, "{:.0f}"),
}
"""Name of a plot -> the number that it plots against the pruning ratio."""


@dataclass(frozen=True)
class Point:
    """The finished jobs of one arm at one ratio, in the order of their seeds.

    ``settings`` are the jobs' overrides of other keys in which jobs of the sweep differ, such as
    "model.depth=2"; ``ratio`` is None if the arm is the same at all ratios.
    """

    arm: str
    settings: tuple[str, ...]
    ratio: float | None
    jobs: Sequence[Job]

    @property
    def label(self) -> str:
        """The arm and the settings, such as "ticket, model.depth=2"."""
        return ", ".join([self.arm, *self.settings])

    def values(self, measure: Measure) -> list[float]:
        """Return a number of all jobs that have it, in the order of their seeds."""
        return list(self._by_seed(measure).values())

    def increase_over(self, other: Point | None, measure: Measure) -> float | None:
        """Return the relative increase over the other point, averaged over common seeds.

        10.5 against 10 is 0.05; None if there is no common seed.
        """
        baseline = {} if other is None else other._by_seed(measure)
        values = self._by_seed(measure)
        increases = [values[seed] / baseline[seed] - 1 for seed in values if baseline.get(seed)]
        return mean(increases) if increases else None

    def _by_seed(self, measure: Measure) -> dict[float | None, float]:
        results = [(job.seed, job.result) for job in self.jobs]
        numbers = {seed: measure.number(result) for seed, result in results if result is not None}
        return {seed: number for seed, number in numbers.items() if number is not None}


def group_jobs(jobs: Sequence[Job]) -> list[Point]:
    """Group finished jobs by arm and ratio."""
    keys = differing_keys(jobs)
    groups: dict[tuple[str, tuple[str, ...], float | None], list[Job]] = {}
    for job in jobs:
        if job.result is not None:
            settings = tuple(f"{k}={v}" for k, v in overrides_of(job, keys).items())
            groups.setdefault((job.arm, settings, job.ratio), []).append(job)
    points = [
        Point(*place, sorted(group, key=lambda job: job.seed or 0))
        for place, group in groups.items()
    ]
    return sorted(points, key=lambda point: (point.label, point.ratio or 0))


def differing_keys(jobs: Sequence[Job]) -> list[str]:
    """Return the keys, except arm, ratio and seed, for which the jobs' overrides differ."""
    tables = [_overrides(job) for job in jobs]
    keys = {key: None for table in tables for key in table}
    return [
        key
        for key in keys
        if key not in ("arm", "seed", "pruning.ratio")
        and len({table.get(key) for table in tables}) > 1
    ]


def overrides_of(job: Job, keys: Sequence[str]) -> dict[str, str]:
    """Return the job's overrides of these keys."""
    table = _overrides(job)
    return {key: table[key] for key in keys if key in table}


def _overrides(job: Job) -> dict[str, str]:
    pairs = (override.partition("=") for override in job.overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


# Tables


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one row for each job, with unformatted numbers."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["job"])
        writer.writeheader()
        writer.writerows(rows)


def _summary(points: Sequence[Point]) -> Section:
    others = [measure for measure in CURVES.values() if measure is not TEST_PERPLEXITY]
    rows = []
    for point in points:
        increase = point.increase_over(_dense_beside(point, points), TEST_PERPLEXITY)
        rows.append(
            (
                point.label,
                "" if point.ratio is None else f"{point.ratio:g}",
                str(len(point.jobs)),
                _mean_and_range(point, TEST_PERPLEXITY),
                "" if increase is None else f"{increase:+.1%}",
                *(_mean_and_range(point, measure) for measure in others),
            )
        )
    columns = ["arm", "pruned", "seeds", TEST_PERPLEXITY.name, "against dense"]
    columns += [measure.name for measure in others]
    return Section("Mean over seeds (least to most)", columns, rows)


def _dense_beside(point: Point, points: Sequence[Point]) -> Point | None:
    """Return the dense runs that differ from a point in nothing else, if there are any."""
    place = "dense", point.settings, None
    return next((p for p in points if (p.arm, p.settings, p.ratio) == place), None)


def _mean_and_range(point: Point, measure: Measure) -> str:
    """Return the mean and the range of a measure, such as "4.10 (4.05 to 4.15)"."""
    values = point.values(measure)
    if not values:
        return ""
    average, least, most = map(measure.format.format, (mean(values), min(values), max(values)))
    return average if least == most else f"{average} ({least} to {most})"


def _unfinished(jobs: Sequence[Job]) -> Section:
    rows = [
        (job.folder.name, job.status, job.problem, job.command)
        for job in jobs
        if job.result is None
    ]
    columns = ("job", "status", "error", "command to repeat it")
    return Section("Jobs that have not finished", columns, rows)


def _jobs(rows: Sequence[Row]) -> Section:
    columns = [
        name
        for name in (rows[0] if rows else {})
        if name not in ("error", "command") and any(row[name] not in (None, "") for row in rows)
    ]
    cells = [[_cell(row[name]) for name in columns] for row in rows]
    return Section("All jobs", [name.replace("_", " ") for name in columns], cells)


def _row(job: Job, keys: Sequence[str]) -> Row:
    """Return the row of a job: its settings, its result, and the command to repeat it."""
    row: Row = {
        "job": job.folder.name,
        "status": job.status,
        "arm": job.arm,
        "ratio": job.ratio,
        "seed": job.seed,
        **dict.fromkeys(keys, ""),
        **overrides_of(job, keys),
    }
    result = job.result
    for name in _RESULT_COLUMNS:
        row[name] = None if result is None else getattr(result, name)
    for period in _PERIODS:
        row[f"{period}_step_ms"] = result and result.step_milliseconds(period)
    return {**row, "error": job.problem, "command": job.command}


_PERIODS: tuple[Period, ...] = "dense", "sparse"

_RESULT_COLUMNS = (
    *("stages", "replicas", "parameters", "tokens_per_parameter", "steps"),
    *("density", "draw_step"),
    *("validation_perplexity", "test_perplexity", "validation_loss", "test_loss"),
    *("validation_accuracy", "test_accuracy", "train_loss"),
    *("largest_state_bytes", "largest_reduced_bytes"),
)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


# Curves


def curves(points: Sequence[Point]) -> dict[str, Figure]:
    """Return the plots against the pruning ratio for which there are numbers, by name."""
    from matplotlib.figure import Figure

    figures = {}
    for name, measure in CURVES.items():
        if not any(p.ratio is not None and p.values(measure) for p in points):
            continue
        figures[name] = figure = Figure(figsize=(4, 2.8), layout="constrained")
        axes = figure.subplots()
        for number, label in enumerate(dict.fromkeys(point.label for point in points)):
            arm = [p for p in points if p.label == label and p.values(measure)]
            _plot_arm(axes, arm, measure, label, f"C{number % 10}")
        axes.set(xlabel="pruned (fraction of the entries)", title=measure.name)
        axes.legend(frameon=False, fontsize="small")
    return figures


def _plot_arm(axes: Axes, arm: Sequence[Point], measure: Measure, label: str, color: str) -> None:
    """Plot an arm: a curve through the means, with bars from the least to the largest value.

    An arm that is the same at all ratios is a horizontal line in a band.
    """
    for point in arm:
        values = point.values(measure)
        if point.ratio is None:
            axes.axhline(mean(values), linestyle="--", label=label, color=color)
            axes.axhspan(min(values), max(values), alpha=0.15, color=color)
        else:
            axes.vlines(point.ratio, min(values), max(values), color=color)
    means = [(p.ratio, mean(p.values(measure))) for p in arm if p.ratio is not None]
    if means:
        axes.plot(*zip(*means, strict=True), "o-", markersize=4, label=label, color=color)


# The report


def gather(folder: Path) -> list[Job]:
    """Write ``sweep.csv``, ``sweep.html`` and plots to a sweep's folder; return its jobs."""
    # matplotlib takes long to import.
    from lightning_axosparse.callbacks.report.page import (
        figure,
        page,
        paragraph,
        save_plots,
        table,
    )

    jobs = jobs_in(folder)
    points, keys = group_jobs(jobs), differing_keys(jobs)
    rows = [_row(job, keys) for job in jobs]
    write_csv(rows, folder / "sweep.csv")
    blocks = [paragraph(_finished(jobs)), *map(paragraph, _warnings(points))]
    if resume := resume_command(folder):
        blocks.append(f"<p>The command that resumes the sweep: <code>{escape(resume)}</code></p>")
    plots = curves(points)
    save_plots(plots, folder)
    blocks += [table(_summary(points)), *(figure(name, plot) for name, plot in plots.items())]
    blocks += [table(_unfinished(jobs)), table(_jobs(rows))]
    (folder / "sweep.html").write_text(page("Sweep", blocks))
    return jobs


def _warnings(points: Sequence[Point]) -> list[str]:
    """Say what the numbers of finished jobs do not show."""
    results = [job.result for point in points for job in point.jobs if job.result]
    tokens = [r.tokens_per_parameter for r in results if r.tokens_per_parameter]
    warnings = [too_short(min(tokens, default=0))]
    pruned = [point for point in points if point.ratio is not None]
    alone = [point.label for point in pruned if _dense_beside(point, points) is None]
    if alone and len(alone) == len(pruned):
        warnings.append("No run of the dense arm has finished: what pruning costs is not known.")
    elif alone:
        names = "; ".join(dict.fromkeys(alone))
        warnings.append(f"No dense run with the same settings has finished beside {names}.")
    return list(filter(None, warnings))


def summary(folder: Path, jobs: Sequence[Job]) -> str:
    """Return, as text, how many jobs have finished, commands to repeat others, and the report."""
    lines = [_finished(jobs)]
    for job in jobs:
        if job.result is None:
            problem = job.problem or "it was killed, or still runs"
            lines.append(f"{job.folder.name} has {job.status}: {problem}")
            lines.append(f"    {job.command}")
    return "\n".join([*lines, f"Report of the sweep: {folder.absolute() / 'sweep.html'}"])


def resume_command(folder: Path) -> str | None:
    """Return the command that resumes the sweep; None if Hydra did not start it."""
    file = folder / "multirun.yaml"
    if not file.exists():
        return None
    # Not resolved: an override may have an interpolation.
    overrides: Any = OmegaConf.to_container(OmegaConf.load(file).hydra.overrides)
    return command(["-m"], overrides["task"], overrides["hydra"], "hydra.sweep.dir", folder)


def _finished(jobs: Sequence[Job]) -> str:
    return f"{sum(job.result is not None for job in jobs)} of {len(jobs)} jobs have finished."


class GatherResults(Callback):
    """Writes the report of a sweep at its end; the command fails if a job did not finish."""

    @override
    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            jobs = gather(folder)
        except Exception as error:  # Hydra would turn it into a warning, and the command succeed.
            again = shlex.join(["axosparse-sweep", str(folder)])
            raise SystemExit(
                "axosparse-train: The report of the sweep was not written: "
                f"{error_message(error)}. The results of its jobs are kept. Mend this, and write "
                f"it with: {again}" + see("commands")
            ) from error
        print(summary(folder, jobs))
        if any(job.result is None for job in jobs):
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = sweep_parser()
    folder: Path = parser.parse_args(arguments).folder
    jobs = gather(folder)
    if not jobs:
        parser.exit(1, f"No job has begun in '{folder}'.\n")
    print(summary(folder, jobs))


if __name__ == "__main__":
    main()
