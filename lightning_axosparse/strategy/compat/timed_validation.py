"""Lets all ranks validate after the same batch where a clock says when."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_axosparse.support.patched import patched


def validating_together(trainer: Trainer) -> AbstractContextManager[None]:
    """Let the ranks validate inside the context when the first clock of them says so.

    With ``val_check_interval`` in units of time Lightning lets each rank look at its own clock.
    """
    if trainer._val_check_time_interval is None:  # type: ignore[attr-defined]
        return nullcontext()
    loop = trainer.fit_loop.epoch_loop
    decide = partial(_decide_together, trainer, loop._should_check_val_fx)
    return patched(loop, "_should_check_val_fx", decide)


def _decide_together(trainer: Trainer, decide: Any, data_fetcher: Any) -> bool:
    return trainer.strategy.reduce_boolean_decision(decide(data_fetcher), all=False)
