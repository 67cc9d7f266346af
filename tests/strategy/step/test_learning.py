"""Losses are differentiated by parts where that is right, and once a batch from where it is not."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.step.comparison import Comparison
from lightning_axosparse.strategy.step.learning import LoaderSteps
from tests.parity.cases import trainer

Step = Callable[["Net", Tensor, Tensor], Tensor]


class Net(L.LightningModule):
    """A network whose loss is given."""

    def __init__(self, loss: Step) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
        self.mean, self.given = MeanMetric(), loss
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.given(self, self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(samples: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, y), 8)


def train(step: Step, strategy: Any, samples: int = 32, max_epochs: int = 1) -> Net:
    L.seed_everything(0, verbose=False)
    module = Net(step).double()
    run = trainer(strategy, precision="64-true", max_epochs=max_epochs, logger=False)
    run.fit(module, loader(samples))
    return module


def pipeline(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, 4, transport="loopback", **options)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """Returns what was said since of losses that are differentiated once a batch."""
    caplog.set_level("INFO")
    return lambda: [each for each in caplog.messages if "differentiated once a batch" in each]


def assert_equals_one_process(step: Step, **options: Any) -> None:
    ours, theirs = train(step, pipeline(**options)), train(step, "auto")
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=0, atol=1e-13)
    for name, weight in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], weight, rtol=0, atol=1e-13)


def mse(module: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y)


PARTS: dict[str, Step] = {
    "mean": mse,
    "sum": lambda m, z, y: F.mse_loss(z, y, reduction="sum") * 0.05,
    "noise of samples": lambda m, z, y: F.mse_loss(z + torch.randn_like(z), y),
    "dropout": lambda m, z, y: F.mse_loss(F.dropout(z, 0.5), y),
    "over its samples": lambda m, z, y: F.mse_loss(z, y, reduction="sum") / len(z),
    "by deprecated arguments": lambda m, z, y: F.mse_loss(z, y, reduce=False).mean(),
    "mean of a mask": lambda m, z, y: (z - y).abs()[y > 0].mean(),
    "sum by a count": lambda m, z, y: (z - y)[y > 0].abs().sum() / (y > 0).sum().clamp(min=1),
}


@pytest.mark.parametrize("name", PARTS)
def test_means_and_sums_go_by_parts(name: str, lines: Any) -> None:
    assert_equals_one_process(PARTS[name])
    assert lines() == []


WHOLE: dict[str, Step] = {
    "standardized": lambda m, z, y: F.mse_loss((z - z.mean(0)) / z.std(0), y),
    "half": lambda m, z, y: F.mse_loss(z[: len(z) // 2], y[: len(z) // 2]),
    "times a deviation": lambda m, z, y: F.mse_loss(z, y) * z.std(0).mean(),
    "root": lambda m, z, y: F.mse_loss(z, y).sqrt(),
    "one": lambda m, z, y: F.mse_loss(z, y) / F.mse_loss(z, y).item(),
    "permuted": lambda m, z, y: F.mse_loss(z, y[torch.randperm(len(y))]),
    "numpy": lambda m, z, y: F.mse_loss(z, y) * np.random.rand(len(z)).mean(),
    "a shared number": lambda m, z, y: F.mse_loss(z * random.random() * np.random.rand(), y),
    "a mean and a sum": lambda m, z, y: F.mse_loss(z, y) + F.l1_loss(z, y, reduction="sum"),
    "two views": lambda m, z, y: F.mse_loss(*torch.cat([z, 2 * z]).chunk(2)),
    "noise, then standardized": lambda m, z, y: (z + torch.randn_like(z)).std(0).mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_any_other_loss_is_differentiated_once_a_batch(name: str, lines: Any) -> None:
    assert_equals_one_process(WHOLE[name])
    (line,) = lines()
    assert "training epoch 0, batch 0 on" in line
    assert "all 4 micro-batches" in line


LATER: dict[str, Step] = {
    "other functions": lambda m, z, y: (
        F.mse_loss(z - z.mean(0), y) if m.global_step == 2 else F.mse_loss(z, y)
    ),
    "a weight of zero at first": lambda m, z, y: (
        F.mse_loss(z, y) + float(m.global_step >= 2) * z.std(0).mean()
    ),
    "another dim": lambda m, z, y: (z - y).abs().mean(int(m.global_step < 2)).square().mean(),
    "a mean, then a sum": lambda m, z, y: F.mse_loss(
        z, y, reduction="sum" if m.global_step == 2 else "mean"
    ),
    "a branch of the samples": lambda m, z, y: (
        z.square().mean() if (y > 1.5).any() else (z * y).mean()
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_changes_later_equals_one_process(name: str) -> None:
    assert_equals_one_process(LATER[name])


def test_a_loss_that_changes_at_a_batch_is_said_with_that_batch(lines: Any) -> None:
    train(LATER["other functions"], pipeline())
    (line,) = lines()
    assert "training_step, training epoch 0, batch 2 on" in line


@pytest.mark.parametrize("loss", ["whole", "parts"])
def test_the_user_may_say_how(loss: str, lines: Any) -> None:
    assert_equals_one_process(mse, loss=loss)
    assert lines() == []


def test_by_parts_a_loss_that_is_no_mean_counts_as_one(lines: Any) -> None:
    standardized = WHOLE["standardized"]
    ours = train(standardized, pipeline(loss="parts"), samples=8)
    theirs = train(standardized, "auto", samples=8)
    assert not torch.allclose(ours.losses[0], theirs.losses[0])
    assert lines() == []


def test_a_batch_that_does_not_fit_is_followed_only(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fits(comparison: Any, free: Any, may_part: bool) -> Any:
        return compare(comparison, lambda: 0, may_part)

    compare = Comparison.compare
    monkeypatch.setattr(Comparison, "compare", fits)
    assert_equals_one_process(mse)
    assert lines() == []


def test_a_batch_that_has_to_run_whole_and_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_axosparse.strategy.states.free_bytes", lambda *_: 100)
    with pytest.raises(MisconfigurationException, match=r"4 micro-batches.*recompute=.*'parts'"):
        train(WHOLE["standardized"], pipeline())


def test_comparing_leaves_no_trace() -> None:
    seen = []

    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        module.mean.update(z.detach())
        loss = F.mse_loss(F.dropout(z, 0.5), y)
        module.log("loss", loss)
        return loss

    for strategy in (pipeline(), pipeline(loss="whole"), "auto"):
        module = train(step, strategy)
        numbers = torch.rand(()), random.random(), np.random.rand()
        seen.append((module.mean.compute(), module.losses, numbers))
    for mean, losses, numbers in seen:
        torch.testing.assert_close(mean, seen[-1][0], rtol=1e-6, atol=0)
        torch.testing.assert_close(losses, seen[-1][1], rtol=0, atol=1e-13)
        assert numbers == seen[-1][2]


def test_layers_that_compare_samples_are_refused_with_epoch_and_batch() -> None:
    class Standardize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if x.abs().max() > 1.5 else x

    class WithStatistics(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            self.model.insert(0, Standardize())

    with pytest.raises(MisconfigurationException, match=r"epoch 0, batch 0, .*'model\.0'"):
        trainer(pipeline(), precision="64-true", max_epochs=1).fit(
            WithStatistics(mse).double(), loader(16)
        )


def test_backward_hooks_inside_layers_are_named() -> None:
    class Hooked(Net):
        def __init__(self, loss: Step) -> None:
            super().__init__(loss)
            self.model[1][0].register_full_backward_hook(lambda *args: None)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(pipeline(), precision="64-true", max_epochs=1).fit(Hooked(mse).double(), loader(8))
    assert any("Backward hooks of 'model.1.0'" in str(w.message) for w in said)


def test_batches_that_are_compared() -> None:
    known = LoaderSteps()
    due = [n for n in range(1, 41) if known.begin_batch(begins_epoch=False)]
    assert due == [1, 2, 4, 8, 16, 32]
    known = LoaderSteps()
    due = [n for n in range(1, 41) if known.begin_batch(begins_epoch=n % 5 == 1)]
    assert due == [1, 2, 4, 8, 16, 26, 32]  # Of short epochs some first batches.
