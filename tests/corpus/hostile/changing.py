"""Steps that compute a mean over samples at first, and something else in later batches."""

from __future__ import annotations

from collections.abc import Callable
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


def centered(z: Tensor) -> Tensor:
    return z - z.mean(0)


def correlation(z: Tensor, y: Tensor) -> Tensor:
    return F.cosine_similarity(centered(z).flatten(), centered(y).flatten(), dim=0)


def hardest_triplets(z: Tensor, y: Tensor) -> Tensor:
    same = y[:, None, 0].sign() == y[None, :, 0].sign()
    apart = torch.cdist(z, z)
    furthest = apart.masked_fill(~same, 0).amax(1)
    nearest = apart.masked_fill(same, 99).amin(1)
    return (furthest - nearest + 1).relu().mean()


TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pearson": lambda z, y: 1 - correlation(z, y),
    "hardest_triplet": hardest_triplets,
    "uniformity": lambda z, y: torch.exp(-2 * torch.pdist(z).square()).mean().log(),
    "nuclear_norm": lambda z, y: torch.linalg.matrix_norm(z, "nuc"),
}


def _adds(name: str, term: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A step that adds a term whose weight is zero at first."""

    def loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        return F.mse_loss(z, y) + 0.1 * float(is_later(self)) * term(z, y)

    loss.__name__ = f"adds_{name}_later"
    return loss


for _name, _term in TERMS.items():
    entry(Regression, equal=True, trainer=EPOCHS)(_adds(_name, _term))


Losses = Callable[[Any, Tensor, Tensor], Tensor]


def mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)


def of_hardest(self: Any, x: Tensor, y: Tensor, share: float) -> Tensor:
    errors = F.mse_loss(self(x), y, reduction="none").mean(1)
    return errors.topk(max(1, int(share * len(errors)))).values.mean()


def in_a_loop(self: Any, x: Tensor, y: Tensor, power: int) -> Tensor:
    total = x.new_zeros(())
    for row, target in zip(self(x), y, strict=True):
        total = total + (row - target).square().mean()
    return total / len(x) ** power


def of_bags(self: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Bags of samples by an id, of which the largest counts."""
    bags = (x[:, 0] * scale).long().abs()
    z = self(x)
    values = [z[bags == bag].amax(0) - y[bags == bag].amax(0) for bag in bags.unique()]
    return torch.stack(values).square().mean()


SWITCHES: dict[str, tuple[Losses, Losses]] = {
    "mean_to_sum": (mean, lambda m, x, y: F.mse_loss(m(x), y, reduction="sum")),
    "mean_to_root": (mean, lambda m, x, y: F.mse_loss(m(x), y).sqrt()),
    "one_dim_to_the_other": (
        lambda m, x, y: (m(x) - y).mean(1).square().mean(),
        lambda m, x, y: (m(x) - y).mean(0).square().mean(),
    ),
    "hard_examples": (
        lambda m, x, y: of_hardest(m, x, y, 1.0),
        lambda m, x, y: of_hardest(m, x, y, 0.4),
    ),
    "power_of_a_count": (
        lambda m, x, y: in_a_loop(m, x, y, 1),
        lambda m, x, y: in_a_loop(m, x, y, 2),
    ),
    "bags": (lambda m, x, y: of_bags(m, x, y, 99.0), lambda m, x, y: of_bags(m, x, y, 0.8)),
    "a_branch_of_all_samples": (
        mean,
        lambda m, x, y: F.mse_loss(m(x), y) * (2.0 if (y > 3).any() else 1.0),
    ),
    "fixed_noise": (
        mean,
        lambda m, x, y: F.mse_loss(
            m(x) + 0.1 * torch.randn(x.shape[0], 3, generator=torch.Generator().manual_seed(0)), y
        ),
    ),
}


def _switches(name: str, losses: tuple[Losses, Losses]) -> Any:
    def loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return losses[is_later(self)](self, x, y)

    loss.__name__ = f"switches_{name}"
    return loss


for _name, _losses in SWITCHES.items():
    entry(Regression, equal=True, trainer=EPOCHS)(_switches(_name, _losses))


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


LOGGED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "quantile": lambda z, y: (z - y).flatten().quantile(0.9),
}


def _logs(name: str, value: Callable[[Tensor, Tensor], Any]) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        z = self(x)
        if is_later(self):
            self.log("later", float(value(z.detach(), y)))
        return F.mse_loss(z, y)

    training_step.__name__ = f"logs_{name}_later"
    return training_step


for _name, _value in LOGGED.items():
    entry(Regression, hook="training_step", equal=True, trainer=EPOCHS)(_logs(_name, _value))


@entry(Regression, hook="validation_step", equal=True, trainer=EPOCHS)
def validates_with_pearson_later(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    z = self(x)
    self.log("val_loss", F.mse_loss(z, y) + (self.current_epoch > 0) * TERMS["pearson"](z, y))


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
