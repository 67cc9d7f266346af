"""Who may look at gradients before the optimizer and while they are cleared."""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.compat.gradients import clearing_is_seen, gradients_are_seen
from tests.parity.cases import CLASSES, Net, loader, trainer


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


class Cleared(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None: ...


class Clears(Callback):
    def on_before_zero_grad(self, *_: Any) -> None: ...


class OwnClearing(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("module", "callbacks", "optimizer", "seen"),
    [
        (Net, [], torch.optim.SGD, False),
        (Net, [Watching()], torch.optim.SGD, False),
        (Cleared, [], torch.optim.SGD, True),
        (Net, [Clears()], torch.optim.SGD, True),
        (Net, [], OwnClearing, True),
    ],
)
def test_who_sees_gradients_being_cleared(
    module: type[Net], callbacks: list[Callback], optimizer: Any, seen: bool
) -> None:
    run = prepared(module(), callbacks=callbacks)
    run.strategy.optimizers = [optimizer(run.strategy.lightning_module.parameters(), lr=0.1)]
    assert clearing_is_seen(run) is seen


MICROBATCHES = 2


class InStep(Net):
    """Counts the gradients of the step before that still exist in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Parameter(torch.ones(CLASSES))  # in no optimizer
        self.alive: list[int] = []
        self._gradients: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.alive.append(sum(gradient() is not None for gradient in self._gradients))
        return nn.functional.cross_entropy(self(batch[0]) * self.outside, batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        self._gradients = [weakref.ref(p.grad) for p in self.model.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def pipeline() -> AxoSparseStrategy:
    """Micro-batches on one rank, whose steps alone are run."""
    return AxoSparseStrategy(1, MICROBATCHES, check_first_batch=False)


def fitted(strategy: Any, accumulated: int) -> InStep:
    module = InStep()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    run = trainer(strategy, accumulate_grad_batches=accumulated, max_epochs=1)
    run.fit(module, loader(1, batches=4))
    return module


def test_gradients_of_the_last_step_are_freed_before_the_next() -> None:
    module, other = (fitted(each, 1) for each in (pipeline(), "auto"))
    assert module.alive == 4 * MICROBATCHES * [0]
    assert module.outside.grad is not None  # It goes on growing, as nothing clears it.
    torch.testing.assert_close(module.outside.grad, other.outside.grad)


def test_accumulated_gradients_are_kept() -> None:
    module, other = (fitted(each, 2) for each in (pipeline(), "auto"))
    weights = len(list(module.model.parameters()))
    assert module.alive == 2 * (MICROBATCHES * [0] + MICROBATCHES * [weights])
    torch.testing.assert_close(module.state_dict(), other.state_dict())
