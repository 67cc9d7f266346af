"""Writes the tables of a sweep: what it found, all its jobs, and what went wrong."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from lightning_axosparse.callbacks.report.tables import Section
from lightning_axosparse.cli.sweep.job import Job
from lightning_axosparse.cli.sweep.points import (
    DRAW,
    REDUCED,
    STATE,
    STEP,
    TEST,
    Measure,
    Point,
    chosen,
    varying,
)

_SUMMARISED = (TEST, STATE, REDUCED, STEP, DRAW)
_DENSE = "dense"


def write_csv(jobs: Sequence[Job], path: Path) -> None:
    """Write one row for each job, with its numbers as they are."""
    rows = [_row(job, varying(jobs)) for job in jobs]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["job"])
        writer.writeheader()
        writer.writerows(rows)


def sections(jobs: Sequence[Job], found: Sequence[Point]) -> list[Section]:
    """Return the tables of a report in order, without empty ones."""
    every = [_summary(found), _unfinished(jobs), _jobs(jobs)]
    return [section for section in every if section.rows]


def _summary(found: Sequence[Point]) -> Section:
    by_place = {(point.label, point.ratio): point for point in found}
    rows = []
    for point in found:
        dense = by_place.get((_DENSE, None))
        rows.append(
            (
                point.label,
                "" if point.ratio is None else f"{point.ratio:g}",
                point.variant,
                str(len(point.jobs)),
                *(spread(point, measure) for measure in _SUMMARISED[:1]),
                _percent(point.against(dense, TEST.number)),
                *(spread(point, measure) for measure in _SUMMARISED[1:]),
            )
        )
    columns = ["arm", "pruned", "best in validation", "seeds", TEST.name]
    columns += ["against dense", *(m.name for m in _SUMMARISED[1:])]
    return Section("Mean over seeds (least to most)", columns, rows)


def spread(point: Point, measure: Measure) -> str:
    """Return the mean of a measure and its least and largest value, in words."""
    values = point.values(measure.number)
    if not values:
        return ""
    middle, least, most = map(measure.format.format, (mean(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"


def _unfinished(jobs: Sequence[Job]) -> Section:
    rows = [
        (job.folder.name, job.status, job.problem, job.command)
        for job in jobs
        if job.result is None
    ]
    columns = ("job", "status", "error", "the command that runs it again, alone")
    return Section("Jobs that have not finished", columns, rows)


def _jobs(jobs: Sequence[Job]) -> Section:
    table = [_row(job, varying(jobs)) for job in jobs]
    columns = [
        name
        for name in (table[0] if table else {})
        if name not in ("error", "command") and any(row[name] not in (None, "") for row in table)
    ]
    rows = [[_cell(row[name]) for name in columns] for row in table]
    return Section("All jobs", [name.replace("_", " ") for name in columns], rows)


def _row(job: Job, others: Sequence[str]) -> dict[str, object]:
    """Return all that is known of a job, by column."""
    row: dict[str, object] = {
        "job": job.folder.name,
        "status": job.status,
        "arm": job.arm,
        "variant": job.variant,
        "ratio": job.ratio,
        "seed": job.seed,
        **dict.fromkeys(others, ""),
        **chosen(job, others),
    }
    result = job.result
    for name in ("stages", "replicas", "parameters", "steps", "density", "draw_step"):
        row[name] = None if result is None else getattr(result, name)
    for kind in ("perplexity", "loss", "accuracy"):
        for text in ("validation", "test"):
            row[f"{text}_{kind}"] = None if result is None else getattr(result, f"{text}_{kind}")
    row["train_loss"] = None if result is None else result.train_loss
    row["largest_state_bytes"] = result and max(result.state_bytes[result.period])
    row["largest_reduced_bytes"] = result and max(result.reduced_bytes[result.period])
    for period in ("dense", "sparse"):
        seconds = [] if result is None else result.step_seconds.get(period, [])
        row[f"{period}_step_ms"] = 1e3 * mean(seconds) if seconds else None
    row["error"] = job.problem
    row["command"] = job.command
    return row


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return f"{value:,}" if type(value) is int and value >= 10_000 else str(value)


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:+.1%}"
