"""Reads the strategy, the grid, the callbacks and the output folder from a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, cast

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.strategy.compat.internals import callbacks_of as all_callbacks
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from lightning_axosparse.support.troubleshooting import see

C = TypeVar("C", bound=L.Callback)


def strategy_of(trainer: L.Trainer) -> AxoSparseStrategy:
    """The trainer's strategy, which :func:`require_strategy` has checked."""
    return cast(AxoSparseStrategy, trainer.strategy)


def require_strategy(trainer: L.Trainer, callback: L.Callback, lack: str) -> None:
    """Check that a callback has the strategy that it needs.

    Args:
        trainer: the trainer.
        callback: the callback.
        lack: what other strategies do not do, in words.

    Raises:
        MisconfigurationException: if it has another one.
    """
    if not hasattr(trainer.strategy, "use_freed_memory"):
        raise MisconfigurationException(
            f"{type(callback).__name__} needs strategy='axosparse' (AxoSparseStrategy); "
            f"{type(trainer.strategy).__name__} {lack}." + see("tickets")
        )


def grid_of(trainer: L.Trainer) -> Grid:
    """Return the strategy's grid; every rank is a replica of one stage if it has none."""
    grid = getattr(trainer.strategy, "grid", None)
    return grid or Grid(trainer.world_size, g_inter=1, rank=trainer.global_rank)


def callbacks_of(trainer: L.Trainer, kind: type[C]) -> list[C]:
    """Return the trainer's callbacks of one class."""
    return [callback for callback in all_callbacks(trainer) if isinstance(callback, kind)]


def folder_of(trainer: L.Trainer, folder: Path | None) -> Path:
    """Return ``folder``, or else the trainer's ``default_root_dir``; create it if missing."""
    chosen = Path(trainer.default_root_dir) if folder is None else folder
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen
