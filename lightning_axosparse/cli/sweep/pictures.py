"""Plots the curves of a sweep against the pruning ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_axosparse.cli.sweep.points import DRAW, REDUCED, STATE, STEP, TEST, Measure, Point

_PICTURES = {
    "perplexity.png": TEST,
    "memory.png": STATE,
    "all_reduce.png": REDUCED,
    "step_time.png": STEP,
    "draw_step.png": DRAW,
}


def save_pictures(found: Sequence[Point], folder: Path) -> list[str]:
    """Write the pictures for which there are numbers to ``folder``; return their names in order."""
    names = []
    for name, measure in _PICTURES.items():
        if any(point.ratio is not None and point.values(measure.number) for point in found):
            _curves(found, measure).savefig(folder / name, dpi=120)
            names.append(name)
    return names


def _curves(found: Sequence[Point], measure: Measure) -> Figure:
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, label in enumerate(dict.fromkeys(point.label for point in found)):
        own = [p for p in found if p.label == label and p.values(measure.number)]
        color = f"C{number % 10}"
        _curve(axes, [point for point in own if point.ratio is not None], measure, label, color)
        for point in own:
            if point.ratio is None:
                _line(axes, point.values(measure.number), label, color)
    axes.set(xlabel="pruned (fraction of the entries)", ylabel=measure.name)
    axes.legend(frameon=False, fontsize="small")
    return figure


def _curve(axes: Axes, own: Sequence[Point], measure: Measure, label: str, color: str) -> None:
    """Draw a curve through the means, with bars from the least to the largest value."""
    if not own:
        return
    values = [point.values(measure.number) for point in own]
    means = [mean(each) for each in values]
    below = [middle - min(each) for middle, each in zip(means, values, strict=True)]
    above = [max(each) - middle for middle, each in zip(means, values, strict=True)]
    ratios = [point.ratio for point in own if point.ratio is not None]
    axes.errorbar(
        ratios, means, [below, above], fmt="o-", capsize=3, markersize=4, label=label, color=color
    )


def _line(axes: Axes, values: Sequence[float], label: str, color: str) -> None:
    """Draw a line at the mean, in a band from the least to the largest value."""
    axes.axhline(mean(values), linestyle="--", label=label, color=color)
    axes.axhspan(min(values), max(values), alpha=0.15, color=color)
