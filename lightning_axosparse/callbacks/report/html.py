"""Writes the report of a run as one HTML page: tables, curves, masks, and the recorded steps."""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from itertools import islice

from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lightning_axosparse.callbacks.report.facts import RunFacts
from lightning_axosparse.callbacks.report.page import page, picture, table
from lightning_axosparse.callbacks.report.plots import svg
from lightning_axosparse.callbacks.report.tables import about, sections
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket

_PICTURES = 48
"""The most masks that are shown."""

_PIXELS = 64
"""The most of a mask's picture, along each side."""


def html(
    facts: RunFacts, figures: Mapping[str, Figure], ticket: Ticket | ChannelTicket | None
) -> str:
    """Return the page.

    Args:
        facts: of the run.
        figures: the plots of the run, by name.
        ticket: whose masks are shown.
    """
    plots = [picture(name, svg(figure), "svg+xml") for name, figure in figures.items()]
    blocks = [table(about(facts)), *(f'<figure class="plot">{plot}</figure>' for plot in plots)]
    blocks += map(table, sections(facts))
    if isinstance(ticket, Ticket):
        blocks.append(_masks(ticket))
    return page("Training report", blocks)


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
