"""Defines the periods of a run: before, between and after the first pruning and the draw."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.ticket_search import TicketSearch
from lightning_axosparse.callbacks.trainer_info import callbacks_of

Period = Literal["dense", "pruning", "sparse"]
"""What the model is: dense before anything is pruned, sparse or with fewer channels after the draw.
"""


def search_of(trainer: Trainer) -> TicketSearch | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    return next(iter(callbacks_of(trainer, TicketSearch)), None)


def period_of(trainer: Trainer) -> Period:
    """Return what the model is now."""
    search = search_of(trainer)
    if search is None or not search.has_pruned:
        return "dense"
    return "pruning" if search.ticket is None else "sparse"
