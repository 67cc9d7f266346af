"""Keeps Lightning's logging quiet where a pipeline says more, or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_axosparse.support.patched import patched


class _SilentLogger(DummyLogger):
    """Takes everything and writes nothing; its folder is that of another logger.

    Args:
        logger: the other one.
    """

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        has_log_dir = isinstance(logger, (TensorBoardLogger, CSVLogger))  # as `Trainer.log_dir`
        self._folder = logger.log_dir if has_log_dir else logger.save_dir

    @property
    @override
    def save_dir(self) -> str | None:
        return self._folder


@contextmanager
def loggers_silenced(trainer: pl.Trainer) -> Iterator[None]:
    """Let ``self.logger`` take everything and write nothing inside the context.

    ``trainer.log_dir``, which a step may ask for, is what this rank has, without a broadcast: where
    the step fails on one stage, the next one would not take part in it.
    """
    silent = [_SilentLogger(logger) for logger in trainer.loggers]
    own = patched(trainer.strategy, "broadcast", lambda value, src=0: value)
    with patched(trainer, "_loggers", silent), own:
        yield


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
