"""Writes the report of a run as one HTML page: tables, curves, masks, and the recorded steps."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from itertools import islice

from matplotlib.image import imsave
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_axosparse.callbacks.gantt import RecordedStep
from lightning_axosparse.callbacks.report.charts import (
    Curve,
    density_chart,
    gantt_chart,
    line_chart,
    zoom,
)
from lightning_axosparse.callbacks.report.facts import RunFacts
from lightning_axosparse.callbacks.report.page import page, picture, table
from lightning_axosparse.callbacks.report.tables import sections
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket

_PICTURES = 48
"""The most masks that are shown."""

_PIXELS = 64
"""The most of a mask's picture, along each side."""


def html(
    facts: RunFacts, steps: Sequence[RecordedStep], ticket: Ticket | ChannelTicket | None
) -> str:
    """Return the page.

    Args:
        facts: of the run.
        steps: those that were recorded.
        ticket: whose masks are shown.
    """
    blocks = [_losses(facts)]
    if facts.distances:
        blocks.append(_distances(facts))
    if steps:
        blocks.append("<h2>Recorded steps</h2>")
        blocks += map(gantt_chart, steps)
    blocks.append(
        "<p>The wheel zooms into a chart, dragging moves it, a double click resets it.</p>"
    )
    blocks += map(table, sections(facts))
    if facts.draw is not None and facts.draw.sparsity:
        blocks.append(density_chart({n: 1 - pruned for n, pruned in facts.draw.sparsity.items()}))
    if isinstance(ticket, Ticket):
        blocks.append(_masks(ticket))
    return page("Training report", blocks, zoom())


def _losses(facts: RunFacts) -> str:
    validated = [validation.step for validation in facts.validations]
    losses = [validation.loss for validation in facts.validations]
    curves = [Curve("training", "#4c78a8", facts.steps, facts.losses)]
    if validated:
        curves.append(Curve("validation", "#f58518", validated, losses, points=True))
    return line_chart("Loss", "optimizer step", "nats", curves, _draw(facts))


def _distances(facts: RunFacts) -> str:
    at, distances = list(facts.distances), list(facts.distances.values())
    curves = [Curve("to earlier masks", "#4c78a8", at, distances, points=True)]
    if facts.threshold is not None:
        ends = [min(at), max(at)]
        curves.append(Curve("threshold", "#888", ends, [facts.threshold] * 2))
    return line_chart("Mask distance", "optimizer step", "fraction", curves, _draw(facts))


def _draw(facts: RunFacts) -> dict[str, float]:
    if facts.draw is None or facts.draw.step is None:
        return {}
    return {"ticket drawn": facts.draw.step}


def _masks(ticket: Ticket) -> str:
    """Return a picture of each mask: the darker a pixel, the more of its entries are kept."""
    figures = []
    for name in islice(ticket.masks, _PICTURES):
        mask = ticket.masks[name]
        caption = f"<figcaption>{escape(name)}<br>{' x '.join(map(str, mask.shape))}</figcaption>"
        figures.append(f'<figure class="masks">{picture(name, _png(mask))}{caption}</figure>')
    more = len(ticket.masks) - len(figures)
    rest = f" {more} more are not shown." if more else ""
    about = f"<p>Outputs downwards, inputs to the right; dark is kept.{rest}</p>"
    return "\n".join(["<h2>Masks</h2>", about, *figures])


def _png(mask: Tensor) -> bytes:
    """Return a mask, as a matrix of its first dimension and the others, in few grey pixels."""
    matrix = mask.reshape(len(mask), -1)
    rows, columns = (min(_PIXELS, size) for size in matrix.shape)
    pooled = adaptive_avg_pool2d(matrix.float()[None], (rows, columns))[0]
    file = io.BytesIO()
    imsave(file, (1 - pooled).numpy(), cmap="gray", vmin=0, vmax=1, format="png")
    return file.getvalue()
