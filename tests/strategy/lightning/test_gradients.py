"""Who may look at gradients between the backward pass and the optimizer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_axosparse.strategy.lightning.gradients import gradients_are_seen
from tests.parity.cases import Net, trainer


class Clipping(Net):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


class Hooked(Net):
    def on_after_backward(self) -> None: ...


class Watching(Callback):
    def on_before_optimizer_step(self, *_: Any) -> None: ...


class Idle(Callback):
    def on_train_batch_end(self, *_: Any) -> None: ...


def prepared(module: L.LightningModule, **options: Any) -> L.Trainer:
    run = trainer(**options)
    run.strategy.connect(module)
    return run


@pytest.mark.parametrize(
    ("module", "options", "seen"),
    [
        (Net, {}, False),
        (Net, {"callbacks": [Idle()]}, False),
        (Net, {"callbacks": [Watching()]}, True),
        (Net, {"gradient_clip_val": 0.5}, True),
        (Net, {"precision": "bf16-mixed"}, False),
        (Clipping, {}, True),
        (Hooked, {}, True),
    ],
)
def test_what_counts(module: type[Net], options: dict[str, Any], seen: bool) -> None:
    assert gradients_are_seen(prepared(module(), **options)) is seen


def test_a_loss_scaler_counts() -> None:
    run = prepared(Net())
    run.precision_plugin.scaler = object()
    assert gradients_are_seen(run)
