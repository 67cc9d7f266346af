"""Writes the report of a run as one HTML page: tables, curves, masks, and the recorded steps."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_axosparse.callbacks.report.facts import RunFacts
from lightning_axosparse.callbacks.report.tables import Section, about, sections
from lightning_axosparse.callbacks.timeline import RecordedStep, gantt
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket

_MAX_MASKS = 48
"""Further masks are not shown."""

_MAX_PIXELS = 64
"""Along each side of a mask's picture."""


def html(facts: RunFacts, plots: Sequence[str], masks: Sequence[str] = ()) -> str:
    """Return the page of a run, with blocks of HTML for its plots and the masks of its ticket."""
    return page(
        "Training report", [table(about(facts)), *plots, *map(table, sections(facts)), *masks]
    )


def mask_pictures(ticket: Ticket | ChannelTicket | None) -> list[str]:
    """Return a block with a picture of each mask of a ticket, if it has masks.

    The darker a pixel, the more of its entries are unpruned.
    """
    if not isinstance(ticket, Ticket):
        return []
    figures = []
    for name in islice(ticket.masks, _MAX_MASKS):
        mask = ticket.masks[name]
        caption = f"<figcaption>{escape(name)}<br>{' x '.join(map(str, mask.shape))}</figcaption>"
        figures.append(
            f'<figure class="masks">{_picture(name, _png(mask), "png")}{caption}</figure>'
        )
    more = len(ticket.masks) - len(figures)
    rest = f" {more} more are not shown." if more else ""
    about = f"<p>Outputs downwards, inputs to the right; dark is unpruned.{rest}</p>"
    return ["\n".join(["<h2>Masks</h2>", about, *figures])]


def _png(mask: Tensor) -> bytes:
    """Return a grey picture of a mask; a row is an index of the first dimension."""
    matrix = mask.reshape(len(mask), -1)
    rows, columns = (min(_MAX_PIXELS, size) for size in matrix.shape)
    pooled = adaptive_avg_pool2d(matrix.float()[None], (rows, columns))[0]
    file = io.BytesIO()
    imsave(file, (1 - pooled).numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return file.getvalue()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left }
td + td { font-variant-numeric: tabular-nums }
code { background: #f4f4f4; overflow-wrap: anywhere } img { max-width: 100% }
figure { margin: 1rem 0 } figure.masks { display: inline-block; margin-right: 1rem }
figure.plot { overflow-x: auto } figure.plot img { min-width: 44rem }
figcaption { font-size: 13px } figure.masks img { image-rendering: pixelated; width: 128px }
"""


def page(title: str, blocks: Sequence[str]) -> str:
    """Return a page of blocks of HTML."""
    phone = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{phone}<title>{escape(title)}</title><style>{_STYLE}</style>'
    body = [f"<h1>{escape(title)}</h1>", *blocks]
    lines = ['<!doctype html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body]
    return "\n".join([*lines, "</body></html>\n"])


def table(section: Section) -> str:
    """Return a section as HTML: its title and its table."""
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in section.rows
    )
    return f"<h2>{escape(section.title)}</h2>\n<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def figure(name: str, plot: Figure) -> str:
    """Return a plot as HTML: an SVG inside the page, in which words are text."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        plot.savefig(file, format="svg", metadata={"Date": None})
    return f'<figure class="plot">{_picture(name, file.getvalue(), "svg+xml")}</figure>'


def _picture(name: str, data: bytes, kind: str) -> str:
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(name)}" src="data:image/{kind};base64,{text}">'


def plots(facts: RunFacts, steps: Sequence[RecordedStep]) -> dict[str, Figure]:
    """Return the plots for which there is data, by name."""
    figures = {}
    figures["loss"], axes = _figure("Loss", "loss (nats)")
    axes.plot(facts.steps, facts.losses, color="#9ecae9", linewidth=1, label="training")
    axes.plot(
        [validation.step for validation in facts.validations],
        [validation.loss for validation in facts.validations],
        "o-",
        color="#f58518",
        label="validation",
    )
    _finish_axes(axes, facts)
    if facts.distances:
        figures["mask_distance"], axes = _figure("Distance to earlier masks", "distance")
        axes.plot(*zip(*facts.distances.items(), strict=True), "o-", label="mask distance")
        if facts.threshold is not None:
            axes.axhline(facts.threshold, color="grey", linestyle=":", label="threshold")
        axes.set_ylim(bottom=0)
        _finish_axes(axes, facts)
    if steps:
        figures["gantt"] = gantt(steps)
    return figures


def _figure(title: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="optimizer step", ylabel=ylabel, title=title)
    return figure, axes


def _finish_axes(axes: Axes, facts: RunFacts) -> None:
    """Mark the draw of this run, set the limits of the axes, and add the legend."""
    if facts.draw and facts.draw.step is not None:
        axes.axvline(facts.draw.step, color="#54a24b", linestyle="--", label="ticket drawn")
    low, *_, high = axes.get_yticks()  # These are beyond the data, so no line is on the frame.
    axes.set(ylim=(low, high))
    axes.set_xlim(left=0)
    axes.legend(frameon=False)


def save_plots(figures: Mapping[str, Figure], folder: Path) -> list[str]:
    """Write plots as PNG to ``folder``; return their file names in order."""
    for name, plot in figures.items():
        plot.savefig(folder / f"{name}.png", dpi=120)
    return [f"{name}.png" for name in figures]
