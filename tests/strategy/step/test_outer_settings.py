"""Settings outside the module that a step changes are those of one process, on all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, trainer
from tests.ranks import run_ranks


class SetsRateBefore(Net):
    """Changes the learning rate before the layers, where every stage runs the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
        return super().training_step(batch, batch_idx)


class Sets(Net):
    """Changes something behind the layers, where only the last stage runs the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.set(loss.detach())
        return loss

    def set(self, loss: Tensor) -> None:
        raise NotImplementedError


class SetsRate(Sets):
    def set(self, loss: Tensor) -> None:
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"], group["weight_decay"] = 0.01 * float(loss), 0.1 * float(loss)


class StepsScheduler(Sets):
    """Has a scheduler that Lightning does not know."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.own = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [2])
        return optimizer

    def set(self, loss: Tensor) -> None:
        self.own.step()


class Freezes(Sets):
    """Freezes a layer of the first stage, in a batch that is compared if the loss is a mean."""

    def set(self, loss: Tensor) -> None:
        if self.global_step == 3:
            next(self.parameters()).requires_grad_(False)


class FreezesForAStep(Sets):
    """Freezes it before the layers, and trains it again behind them, in some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        next(self.parameters()).requires_grad_(self.global_step % 2 == 0)
        return super().training_step(batch, batch_idx)

    def set(self, loss: Tensor) -> None:
        next(self.parameters()).requires_grad_(True)


class Clips(Sets):
    def set(self, loss: Tensor) -> None:
        self.trainer.gradient_clip_val = 0.05 * float(loss)


class Accumulates(Sets):
    def set(self, loss: Tensor) -> None:
        self.trainer.accumulate_grad_batches = 1 + (self.global_step > 1)


class Stops(Sets):
    def set(self, loss: Tensor) -> None:
        self.trainer.should_stop = self.global_step > 1


class StopsInValidation(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.trainer.should_stop = not self.trainer.sanity_checking


class Scale(Callback):
    def __init__(self) -> None:
        self.scale = 1.0

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * self.scale


class SetsCallback(Sets):
    def set(self, loss: Tensor) -> None:
        for each in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(each, Scale):
                each.scale = float(loss)


MODULES: list[type[Net]] = [
    *(SetsRateBefore, SetsRate, StepsScheduler, Freezes, FreezesForAStep, Clips, Accumulates),
    *(Stops, StopsInValidation, SetsCallback),
]


def train(module: type[Net], strategy: Any = "auto", ranks: int = 1, **options: Any) -> Record:
    torch.manual_seed(0)
    run = trainer(strategy, ranks, max_epochs=2, callbacks=[Scale()], **options)
    record = fit(run, module())
    record.rates = [round(rate, 6) for rate in record.rates]
    record.facts["steps"] = run.global_step
    return record


def train_all() -> list[Record]:
    strategy = partial(AxoSparseStrategy, 2, 4, pipeline="model")
    records = [train(module, strategy(), 2) for module in MODULES]
    return [*records, *(train(module, strategy(loss="mean"), 2) for module in (Freezes, Stops))]


@pytest.fixture(scope="module")
def expected() -> list[Record]:
    return [train(module) for module in MODULES]


def assert_same(record: Record, reference: Record) -> None:
    assert record.facts["steps"] == reference.facts["steps"]
    assert difference(record, reference) < 1e-5


# With loss="mean", micro-batches are differentiated before the step sets their number.
@pytest.mark.parametrize("module", [each for each in MODULES if each is not Accumulates])
def test_a_loss_that_is_a_mean(module: type[Net], expected: list[Record]) -> None:
    strategy = AxoSparseStrategy(2, 4, pipeline="model", transport="loopback", loss="mean")
    assert_same(train(module, strategy), expected[MODULES.index(module)])


def test_stages_on_ranks(expected: list[Record]) -> None:
    references = [*expected, *(expected[MODULES.index(module)] for module in (Freezes, Stops))]
    for records in run_ranks(2, train_all):
        for record, reference in zip(records, references, strict=True):
            assert_same(record, reference)


class CountsInALayer(Callback):
    """Counts the calls of a layer in a hook, as a profiler does."""

    def __init__(self) -> None:
        self.calls = 0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        def count(*_: Any) -> None:
            self.calls += 1

        module.model[0].register_forward_hook(count)


def test_what_hooks_of_layers_count_stays() -> None:
    counts = CountsInALayer()
    run = trainer(AxoSparseStrategy(2, 4, pipeline="model", transport="loopback"), max_epochs=1)
    run.callbacks.append(counts)  # type: ignore[attr-defined]
    fit(run, Net())
    assert counts.calls >= 4 * run.global_step


class Anneals(Sets):
    """Changes a parameter of its first layer behind the layers."""

    def set(self, loss: Tensor) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(0.9)


class Clamps(Sets):
    """Clamps the weights, as the critic of a Wasserstein GAN does."""

    def set(self, loss: Tensor) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


@pytest.mark.parametrize("module", [Anneals, Clamps])
def test_changes_that_would_be_lost_are_refused(module: type[Net]) -> None:
    words = r"The step changes 'model\.0\.weight' behind the layers.*on_train_batch_end"
    with pytest.raises(MisconfigurationException, match=words):
        train(module, AxoSparseStrategy(2, 4, pipeline="model"), 2)
