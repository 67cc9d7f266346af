"""Defines the two periods of a run: before and after the ticket is drawn."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.ticket_search import TicketSearch
from lightning_axosparse.callbacks.trainer_info import callbacks_of

Period = Literal["dense", "sparse"]
"""What the model is: dense before a ticket was drawn, sparse or with fewer channels after it."""


def search_of(trainer: Trainer) -> TicketSearch | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    return next(iter(callbacks_of(trainer, TicketSearch)), None)


def period_of(trainer: Trainer) -> Period:
    """Return what the model is now."""
    search = search_of(trainer)
    return "sparse" if search is not None and search.ticket is not None else "dense"
