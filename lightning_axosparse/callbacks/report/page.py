"""Writes the report of a run as one HTML page: tables, curves, masks, and the recorded steps."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice
from pathlib import Path
from string import Template

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_axosparse.callbacks.report.facts import RunFacts
from lightning_axosparse.callbacks.report.tables import (
    Section,
    about,
    headline,
    sections,
    sentences,
)
from lightning_axosparse.callbacks.timeline import RecordedStep, gantt
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket

_MAX_MASKS = 48
"""Further masks are not shown."""

_MAX_PIXELS = 64
"""Along each side of a mask's picture."""


def html(facts: RunFacts, plots: Sequence[str], masks: Sequence[str] = ()) -> str:
    """Return the page of a run; its plots and the masks of its ticket are blocks of HTML."""
    words = [_headline(facts), *map(paragraph, sentences(facts))]
    tables = map(table, [*sections(facts), about(facts)])
    return page("Training report", [*words, *plots, *tables, *masks])


def _headline(facts: RunFacts) -> str:
    numbers = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(' → '.join(values))}</dd></div>"
        for name, values in headline(facts).items()
    )
    return f"<dl>\n{numbers}\n</dl>"


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
    return ["\n".join(["<section><h2>Masks</h2>", about, *figures, "</section>"])]


def _png(mask: Tensor) -> bytes:
    """Return a grey picture of a mask; a row is an index of the first dimension."""
    matrix = mask.reshape(len(mask), -1)
    rows, columns = (min(_MAX_PIXELS, size) for size in matrix.shape)
    pooled = adaptive_avg_pool2d(matrix.float()[None], (rows, columns))[0]
    file = io.BytesIO()
    imsave(file, (1 - pooled).numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return file.getvalue()


def page(title: str, blocks: Sequence[str]) -> str:
    """Return a whole page of blocks of HTML: ``page.html`` around them."""
    template = Template(Path(__file__).with_suffix(".html").read_text())
    return template.substitute(title=escape(title), blocks="\n".join(blocks))


def paragraph(text: str) -> str:
    """Return a sentence or more as a block."""
    return f"<p>{escape(text)}</p>"


def table(section: Section) -> str:
    """Return one table below its title; numbers are to the right, and shares have bars.

    Without rows it is empty.
    """
    if not section.rows:
        return ""
    columns = zip(*section.rows, strict=True)
    align = [' class="number"' if _are_numbers(column) else "" for column in columns]
    rows = [
        "".join(
            f"<td{a}{_bar(cell)}>{escape(cell)}</td>" for a, cell in zip(align, row, strict=True)
        )
        for row in section.rows
    ]
    head = "".join(f"<th{a}>{escape(c)}</th>" for a, c in zip(align, section.columns, strict=True))
    body = "\n".join(f"<tr>{row}</tr>" for row in [head, *rows])
    return f"<section><h2>{escape(section.title)}</h2>\n<table>\n{body}\n</table></section>"


def _are_numbers(cells: Iterable[str]) -> bool:
    """Whether most of a column's cells begin with a number."""
    filled = [cell for cell in cells if cell]
    return 2 * sum(bool(re.match(r"[-+]?\d", cell)) for cell in filled) > len(filled)


def _bar(cell: str) -> str:
    """Return the style that draws a bar behind a percentage."""
    share = re.fullmatch(r"([\d.]+) ?%", cell)
    return f' style="--share: {share[1]}%"' if share else ""


def figure(name: str, plot: Figure) -> str:
    """Return a plot as HTML: an SVG inside the page, in which words are text."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        plot.savefig(file, format="svg", metadata={"Date": None})
    return f"<figure>{_picture(name, file.getvalue(), 'svg+xml')}</figure>"


def _picture(name: str, data: bytes, kind: str) -> str:
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(name)}" src="data:image/{kind};base64,{text}">'


def plots(facts: RunFacts, steps: Sequence[RecordedStep]) -> dict[str, Figure]:
    """Return the plots for which there is data, by name."""
    figures = {}
    unit = "loss (nats)" if facts.tokens_per_parameter else "loss"
    figures["loss"], axes = _figure("Loss", unit)
    losses = [math.nan if loss is None else loss for loss in facts.losses]
    axes.plot(facts.steps, losses, color="#9ecae9", linewidth=1, label="training")
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
    figure = Figure(figsize=(4.8, 2.7), layout="constrained")
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
        plot.savefig(folder / f"{name}.png", dpi=200)
    return [f"{name}.png" for name in figures]
