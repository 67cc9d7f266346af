"""Draws how masks settle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.perplexity.arms import Pruned
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.table import share_of_run


def plot_settling(results: Results, jobs: Sequence[Job], file: Path) -> None:
    """Draw the distances of the finished jobs, a picture for each interval, to a PNG file."""
    lines = [line for line in map(results.of, jobs) if line is not None]
    intervals = lines[0]["arm"]["intervals"]
    figure = Figure(figsize=(4 * len(intervals), 3.6), layout="constrained")
    rows = figure.subplots(1, len(intervals), sharey=True, squeeze=False)
    for axes, count in zip(rows[0], intervals, strict=True):
        for colour, line in enumerate(lines):
            for style, ratio in zip((":", "-", "--"), line["arm"]["ratios"], strict=False):
                distances = line["distances"][f"{ratio}/{count}"]
                shares = [share_of_run(line, place, count) for place in range(len(distances))]
                label = f"{line['task']['learning_rate']:g}, {ratio:.0%}"
                axes.plot(shares, distances, style, color=f"C{colour}", label=label)
        axes.axhline(Pruned().threshold, color="grey", linewidth=0.8)
        axes.axvline(Pruned().draw_after, color="grey", linewidth=0.8)
        axes.set(title=f"compared {count} times", xlabel="share of the run", ylim=(0, 1))
    axes.legend(title="rate, pruned", fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.supylabel("distance to the window")
    figure.savefig(file, dpi=100)
