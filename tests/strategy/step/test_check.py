from __future__ import annotations

import random
import warnings
from collections import Counter
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
from tests.parity.cases import trainer

Step = Callable[["Net", Tensor, Tensor], Tensor]


class Net(L.LightningModule):
    """A network whose loss is given."""

    def __init__(self, loss: Step) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
        self.mean, self.given = MeanMetric(), loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.given(self, self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def loader(samples: int = 16) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, samples, 3, generator=generator)
    return DataLoader(TensorDataset(x, y), 8)


def fit(
    loss: Step, samples: int = 16, max_epochs: int = 1, **options: Any
) -> tuple[Net, list[str]]:
    """Train, and return what was warned of."""
    L.seed_everything(0, verbose=False)
    module = Net(loss)
    strategy = AxoSparseStrategy(2, 4, transport="loopback", **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer(strategy, precision="32-true", max_epochs=max_epochs).fit(module, loader(samples))
    return module, [str(w.message) for w in said if "troubleshooting" in str(w.message)]


def mse(module: Net, z: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(z, y)


REFUSED: dict[str, Step] = {
    "standardized": lambda m, z, y: F.mse_loss((z - z.mean(0)) / z.std(0), y),
    "half": lambda m, z, y: F.mse_loss(z[: len(z) // 2], y[: len(z) // 2]),
    "times a deviation": lambda m, z, y: F.mse_loss(z, y) * z.std(0).mean(),
    "another gradient": lambda m, z, y: z.std() / z.std().item(),
    "noise, then standardized": lambda m, z, y: (z + torch.randn_like(z)).std(0).mean(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_differs_is_refused_with_both_numbers(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"on its 4 micro-batches.*microbatches=1"):
        fit(REFUSED[name])


EQUAL: dict[str, Step] = {
    "mean": mse,
    "noise of samples": lambda m, z, y: F.mse_loss(z + torch.randn_like(z), y),
    "dropout": lambda m, z, y: F.mse_loss(F.dropout(z, 0.5), y),
    "a shared number": lambda m, z, y: F.mse_loss(z * random.random() * np.random.rand(), y),
    "two views": lambda m, z, y: F.mse_loss(*torch.cat([z, 2 * z]).chunk(2)),
    "root": lambda m, z, y: F.mse_loss(z, y).sqrt(),
    "over its samples": lambda m, z, y: F.mse_loss(z, y) / len(z),
    "by deprecated arguments": lambda m, z, y: (
        F.mse_loss(z, y, size_average=False) + F.mse_loss(z, y, reduce=False).sum()
    ),
    "one": lambda m, z, y: F.mse_loss(z, y) / F.mse_loss(z, y).item(),
    "sum by a count": lambda m, z, y: (z - y).abs().sum() / (y > 0).sum().clamp(min=1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_a_loss_that_combines_passes(name: str) -> None:
    assert fit(EQUAL[name])[1] == []


NOT_COMPARED: dict[str, tuple[Step, str]] = {
    "permuted": (lambda m, z, y: F.mse_loss(z, y[torch.randperm(len(y))]), "torch.randperm"),
    "numpy": (lambda m, z, y: F.mse_loss(z, y) * np.random.rand(len(z)).mean(), "NumPy"),
}


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_what_cannot_be_compared_is_said_with_the_reason(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    step, reason = NOT_COMPARED[name]
    with caplog.at_level("INFO"):
        fit(step)
    (line,) = [each for each in caplog.messages if "could not be checked" in each]
    assert reason in line


def test_a_batch_that_does_not_fit_is_not_compared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_axosparse.strategy.states.free_bytes", lambda *_: 100)
    with caplog.at_level("INFO"):
        fit(REFUSED["standardized"])
    assert any("would not fit into memory" in message for message in caplog.messages)


def test_values_that_differ_are_named_with_both_numbers() -> None:
    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        module.log("spread", z.std())
        module.log("root", F.mse_loss(z, y).sqrt())
        module.log("samples", len(z))
        return F.mse_loss(z, y)

    _, said = fit(step)
    (text,) = [each for each in said if "self.log(" in each]
    assert "'spread'" in text
    assert "for the whole first batch" in text


def test_a_loss_that_is_computed_in_another_way_later_is_compared_then() -> None:
    steps: list[int] = []

    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        steps.append(module.global_step)
        return F.mse_loss(z - z.mean(0), y) if module.global_step else F.mse_loss(z, y)

    with pytest.raises(MisconfigurationException, match="micro-batches"):
        fit(step)
    assert max(steps) == 1  # before the second batch has changed a weight


def test_it_leaves_no_trace() -> None:
    seen = []

    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        module.mean.update(z.detach())
        loss = F.mse_loss(F.dropout(z, 0.5), y) * np.random.rand()
        module.log("loss", loss)
        return loss

    for check in (False, True):
        module, _ = fit(step, check_first_batch=check)
        seen.append((module.state_dict(), module.mean.compute(), torch.rand(()), random.random()))
    (weights, *others), (other_weights, *same) = seen
    assert others == same
    assert all(torch.equal(weight, other_weights[name]) for name, weight in weights.items())


def test_it_runs_once_a_fit() -> None:
    calls: Counter[int] = Counter()

    def step(module: Net, z: Tensor, y: Tensor) -> Tensor:
        calls[module.global_step] += 1
        return F.mse_loss(z, y)

    fit(step, max_epochs=3)
    first, *others = (calls[batch] for batch in range(6))
    assert first > 4 + 1  # also the whole batch, and its micro-batches once more
    assert others == [4] * 5


def test_ways_out() -> None:
    fit(REFUSED["standardized"], check_first_batch=False)
    _, said = fit(REFUSED["standardized"], microbatch_weight=len)
    assert len([each for each in said if "The loss of" in each]) == 1
