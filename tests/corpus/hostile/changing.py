"""Steps that compute a mean over samples at first, and something else in later batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MaxMetric, MeanMetric

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Tagger

EPOCHS = {"max_epochs": 2}
"""Six batches, of which the 1st, 2nd and 4th are compared."""

LATER = (2, 4, 5)
"""Optimizer steps before batches that are not compared."""


def is_later(self: Any) -> bool:
    return self.global_step in LATER


def correlation(z: Tensor, y: Tensor) -> Tensor:
    centered = [(each - each.mean(0)).flatten() for each in (z, y)]
    return F.cosine_similarity(*centered, dim=0)


@entry(Regression, equal=True, trainer=EPOCHS)
def adds_pearson_later(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The weight of a term is zero at first."""
    z = self(x)
    return F.mse_loss(z, y) + 0.1 * float(is_later(self)) * (1 - correlation(z, y))


@entry(Regression, equal=True, trainer=EPOCHS)
def draws_fixed_noise_later(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    if is_later(self):
        z = z + 0.1 * torch.randn(z.shape, generator=torch.Generator().manual_seed(0))
    return F.mse_loss(z, y)


def rare(self: Any, y: Tensor) -> Tensor:
    """Samples of an event that no early batch has."""
    return (y[:, 0] > 0).sum() * int(is_later(self))


@entry(equal=True, trainer=EPOCHS)
class CountsRareEventsInADict(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if found := int(rare(self, y)):
            self.counts["rare"] = self.counts.get("rare", 0) + found
        return super().loss(x, y)


@entry(equal=True, trainer=EPOCHS)
class FollowsAnExtremeLater(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        if is_later(self):
            self.largest = torch.maximum(self.largest, (z - y).detach().abs().max())
        return F.mse_loss(z, y)


@entry(equal=True, trainer=EPOCHS)
class ScalesByARunningDeviation(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        if is_later(self):
            self.scale = 0.9 * self.scale + 0.1 * (z - y).detach().std()
        return F.mse_loss(z, y) / self.scale


@entry(equal=True, trainer=EPOCHS)
class UpdatesAMetricLater(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.largest, self.average = MaxMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        if is_later(self):
            self.largest.update((z - y).detach().abs())
            self.average.update((z - y).detach().square().mean().sqrt())
            self.log("largest", self.largest)
            self.log("average", self.average)
        return F.mse_loss(z, y)


@entry(Regression, equal=True, trainer=EPOCHS)
def logs_a_quantile_later(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    if is_later(self):
        self.log("later", float((z.detach() - y).flatten().quantile(0.9)))
    return F.mse_loss(z, y)


@entry(Regression, hook="validation_step", equal=True, trainer=EPOCHS)
def validates_with_pearson_later(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    z = self(x)
    self.log("val_loss", F.mse_loss(z, y) + (self.current_epoch > 0) * correlation(z, y))


@entry(Tagger, equal=True, trainer=EPOCHS)
def branch_of_multi_task_code(self: Any, batch: dict[str, Tensor]) -> Tensor:
    """No word of some batches has the task's label."""
    z = self(batch["words"])
    mask = batch["mask"] & (batch["labels"] > (9 if is_later(self) else 0))
    errors = F.cross_entropy(z.mT, batch["labels"], ignore_index=-100, reduction="none")
    return errors[mask].mean() if mask.any() else 0 * z.sum()


@entry(Tagger, equal=True, trainer=EPOCHS)
def tokens_that_count_change(self: Any, batch: dict[str, Tensor]) -> Tensor:
    z = self(batch["words"])
    ignored = 3 if is_later(self) else -100
    labels = batch["labels"].clamp(min=0)
    return F.cross_entropy(z.mT, labels, ignore_index=ignored)


class CenteredLater(nn.Module):
    """Uses the mean of the samples from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.passes else x


@entry(trainer=EPOCHS)
class LayersCompareSamplesFromEpochOne(Regression):
    """Nothing but a comparison of layers could see it."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, CenteredLater())

    def on_train_epoch_start(self) -> None:
        self.model[2].passes = self.current_epoch
