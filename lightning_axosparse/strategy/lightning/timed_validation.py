"""Lets all ranks validate after the same batch where a clock says when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import Trainer


@contextmanager
def validating_together(trainer: Trainer) -> Iterator[None]:
    """Let the ranks validate inside the context when the first clock of them says so.

    With ``val_check_interval`` in units of time Lightning lets each rank look at its own clock.
    """
    loop = vars(trainer.fit_loop.epoch_loop)
    timed = trainer._val_check_time_interval is not None  # type: ignore[attr-defined]
    if timed:
        decide = trainer.fit_loop.epoch_loop._should_check_val_fx
        loop["_should_check_val_fx"] = partial(_decide_together, trainer, decide)
    try:
        yield
    finally:
        if timed:
            del loop["_should_check_val_fx"]


def _decide_together(trainer: Trainer, decide: Any, data_fetcher: Any) -> bool:
    return trainer.strategy.reduce_boolean_decision(decide(data_fetcher), all=False)
