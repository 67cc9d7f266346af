"""Tells the time before a ticket was drawn from the time after it."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import Trainer

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.callbacks.early_bird_channels import EarlyBirdChannels
from lightning_axosparse.callbacks.trainer_info import callbacks_of

Period = Literal["dense", "sparse"]
"""What the model is: dense before a ticket was drawn, sparse or with fewer channels after it."""

Search = EarlyBirdTicket | EarlyBirdChannels
"""A callback that looks for a ticket."""


def search_of(trainer: Trainer) -> Search | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    found: list[Search] = [
        *callbacks_of(trainer, EarlyBirdTicket),
        *callbacks_of(trainer, EarlyBirdChannels),
    ]
    return found[0] if found else None


def period_of(trainer: Trainer) -> Period:
    """Return what the model is now."""
    search = search_of(trainer)
    return "sparse" if search is not None and search.ticket is not None else "dense"
