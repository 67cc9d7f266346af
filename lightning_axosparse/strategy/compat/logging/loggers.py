"""Keeps Lightning's logging quiet where a pipeline says more, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_axosparse.support.patched import patched


def loggers_silenced(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Let ``self.logger`` take everything and write nothing inside the context."""
    return patched(trainer, "_loggers", [DummyLogger() for _ in trainer.loggers])


@contextmanager
def sync_advice_silenced() -> Iterator[None]:
    """Silence Lightning's advice to use ``sync_dist=True``, where there is one data-parallel rank.

    Lightning takes the stages of a pipeline, which log the same values, for replicas.
    """
    before = list(warnings.filters)
    warnings.filterwarnings(
        "ignore",
        message=r"It is recommended to use `self\.log\(.*sync_dist=True",
        category=PossibleUserWarning,
    )
    ours = [entry for entry in warnings.filters if entry not in before]
    try:
        yield
    finally:
        # Not `catch_warnings`, which would drop the filters that the user's hooks have added.
        warnings.filters[:] = [entry for entry in warnings.filters if entry not in ours]  # type: ignore[index]
