"""Context: what the reporting callbacks ask of the running trainer and of the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import lightning as L
import torch.distributed as dist

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.grid import Grid

Period = Literal["dense", "sparse"]
"""Before the ticket was drawn, and after."""

T = TypeVar("T")
C = TypeVar("C", bound=L.Callback)


def gather(value: T) -> list[T]:
    """The picklable ``value`` of every rank, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def grid_of(trainer: L.Trainer) -> Grid:
    """The trainer's grid; with a strategy that has none, every rank is a replica of one stage."""
    grid = getattr(trainer.strategy, "grid", None)
    return grid or Grid(trainer.world_size, g_inter=1, rank=trainer.global_rank)


def callbacks_of(trainer: L.Trainer, kind: type[C]) -> list[C]:
    """The trainer's callbacks of one kind."""
    # Trainer sets the attribute without declaring it.
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def search_of(trainer: L.Trainer) -> EarlyBirdTicket | None:
    """The callback that draws the ticket, if there is one."""
    return next(iter(callbacks_of(trainer, EarlyBirdTicket)), None)


def period_of(trainer: L.Trainer) -> Period:
    """Whether the weights are still dense."""
    search = search_of(trainer)
    return "sparse" if search is not None and search.ticket is not None else "dense"


def folder_of(trainer: L.Trainer, folder: Path | None) -> Path:
    """Where a callback writes: its own folder, else the trainer's; made when missing."""
    chosen = Path(trainer.default_root_dir) if folder is None else folder
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen
