"""Plots a run's losses, mask distances and recorded steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_axosparse.callbacks.report.facts import RunFacts
from lightning_axosparse.callbacks.timeline import RecordedStep, plot_gantt


def plots(facts: RunFacts, steps: Sequence[RecordedStep]) -> dict[str, Figure]:
    """Return the plots for which there is data, by name."""
    figures = {"loss": _loss(facts)}
    if facts.distances:
        figures["mask_distance"] = _mask_distance(facts)
    if steps:
        figures["gantt"] = _gantt(steps)
    return figures


def save_plots(figures: Mapping[str, Figure], folder: Path) -> list[str]:
    """Write plots as PNG to ``folder``; return their file names in order."""
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", dpi=120)
    return [f"{name}.png" for name in figures]


def svg(figure: Figure) -> bytes:
    """Return a plot as SVG, with its words as text."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _loss(facts: RunFacts) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(facts.steps, facts.losses, color="#9ecae9", linewidth=1, label="training")
    axes.plot(
        [validation.step for validation in facts.validations],
        [validation.loss for validation in facts.validations],
        "o-",
        color="#f58518",
        label="validation",
    )
    if facts.draw:
        _mark_ticket(axes, facts.draw.step)
    axes.set(xlabel="optimizer step", ylabel="loss (nats)", title="Loss")
    axes.legend(frameon=False)
    return figure


def _mask_distance(facts: RunFacts) -> Figure:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(facts.distances), list(facts.distances.values()), "o-", label="mask distance")
    if facts.threshold is not None:
        axes.axhline(facts.threshold, color="grey", linestyle=":", label="threshold")
    if facts.draw:
        _mark_ticket(axes, facts.draw.step)
    axes.set(xlabel="optimizer step", ylabel="distance", title="Distance to earlier masks")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _gantt(steps: Sequence[RecordedStep]) -> Figure:
    rows = sum(len(step.rows) for step in steps)
    figure = Figure(figsize=(12, 1.5 * len(steps) + 0.6 * rows), layout="constrained")
    for axes, step in zip(figure.subplots(len(steps), squeeze=False)[:, 0], steps, strict=True):
        plot_gantt(axes, step)
    return figure


def _mark_ticket(axes: Axes, x: float | None) -> None:
    if x is not None:
        axes.axvline(x, color="#54a24b", linestyle="--", label="ticket drawn")
