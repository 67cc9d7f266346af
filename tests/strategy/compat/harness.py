"""Keeps everything that a run shows of what a module logs, at every moment."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger

Moments = list[tuple[str, dict[str, float]]]
"""When something was seen, and its values by name."""


class ListLogger(Logger):
    name, version = "list", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "at": step})

    def log_hyperparams(self, *args: Any) -> None:
        pass


class History(Callback):
    """Everything that callbacks, loggers and the progress bar could see, at every moment."""

    def __init__(self) -> None:
        self.moments: Moments = []

    def _see(self, moment: str, trainer: Trainer) -> None:
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            seen = {name: float(value) for name, value in getattr(trainer, kind).items()}
            self.moments.append((f"{moment}.{kind}", seen))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._see("train_batch", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("train_epoch", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._see("val_batch", trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("val_epoch", trainer)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("fit", trainer)


def fit(module: LightningModule, strategy: Any, callbacks: Any = (), **options: Any) -> Moments:
    """Train briefly and return what was seen, the logger's rows among it where this rank logs."""
    history, logger = History(), ListLogger()
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=[history, *callbacks],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module)
    rows = logger.rows if trainer.is_global_zero else []
    return history.moments + [("logger", row) for row in rows]


def assert_same(ours: Moments, theirs: Moments, relative: float = 2e-6) -> None:
    assert [moment for moment, _ in ours] == [moment for moment, _ in theirs]
    for (moment, mine), (_, reference) in zip(ours, theirs, strict=True):
        assert mine.keys() == reference.keys(), moment
        for name, value in reference.items():
            assert mine[name] == pytest.approx(value, rel=relative, abs=1e-12, nan_ok=True), (
                moment,
                name,
            )
