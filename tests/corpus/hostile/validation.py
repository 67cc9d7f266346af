"""Values of validation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import R2Score
from torchmetrics.classification import BinarySpecificity

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Classification, Regression, Scalar


class Scaled(Scalar):
    """Validates in the unit of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("y_std", torch.tensor(1.7))
        self.register_buffer("offset", torch.tensor(3.0))


@entry(Scaled, hook="validation_step", equal=True)
def nanmean_in_the_unit_of_the_data(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_mae", torch.nanmean((self(x) - y).abs()) * self.y_std)


@entry(strategy={"microbatches": None}, equal=True)
class R2OfSingleSamples(Scalar):
    """An update of R2Score needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.r2 = R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.r2(out, y)
        self.log("r2", self.r2, on_step=True, on_epoch=True)
        return F.mse_loss(out, y)


@entry(Classification, hook="validation_step")
def balanced_accuracy_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    guess = self(x).argmax(-1)
    rates = [(guess[y == label] == label).float().mean() for label in y.unique()]
    self.log("val_balanced", torch.stack(rates).mean())


@entry(equal=True)
class CollectsOutputs(Regression):
    """Collects what the epoch's end evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.outputs.append(F.mse_loss(self(x), y))

    def on_validation_epoch_end(self) -> None:
        self.log("val_rmse", torch.stack(self.outputs).sqrt().mean())
        self.outputs.clear()


@entry(equal=True)
class CountsBatches(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.batches = 0.0, 0

    def on_validation_epoch_start(self) -> None:
        self.total, self.batches = 0.0, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.total += F.mse_loss(self(x), y, reduction="sum").item()
        self.batches += 1

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.total / self.batches)


@entry(Regression, hook="validation_step")
def standardizes_in_validation(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    x = (x - x.mean(0)) / x.std(0)
    self.log("val_loss", F.mse_loss(self(x), y))


@entry(equal=True)
class BinaryMetricOfLogits(Binary):
    """Torchmetrics takes the sigmoid of an update only if not all of it are probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.specificity = BinarySpecificity()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.specificity.update(self(x) + 0.5, y.long())
        self.log("val_specificity", self.specificity)
