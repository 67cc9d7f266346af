"""Counts of samples, and denominators."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import IGNORED, LENGTH, Binary, Classification, Regression, Scalar, Tagger

ONE_SAMPLE = {"microbatches": None}
"""Of a batch of eight, two stages make micro-batches of one sample by default."""


def token_losses(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = self(batch["words"]).mT, batch["labels"]
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


@entry(Tagger, strategy=ONE_SAMPLE, equal=True)
def at_least_one_as_int(self: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["lengths"][:, None] == LENGTH  # Only whole sentences count.
    return (token_losses(self, batch) * mask).sum() / max(1, int(mask.sum()))


@entry(Tagger, strategy=ONE_SAMPLE, equal=True)
def at_least_one_as_item(self: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["words"] == 3
    return (token_losses(self, batch) * mask).sum() / max(mask.sum().item(), 1)


@entry(Scalar, strategy=ONE_SAMPLE, equal=True)
def at_least_one_of_few_chosen(self: Any, x: Tensor, y: Tensor) -> Tensor:
    chosen = (y > 0.5).float()
    return ((self(x) - y).abs() * chosen).sum() / max(chosen.sum().item(), 1)


@entry(Scalar, equal=True)
def plus_one_in_the_denominator(self: Any, x: Tensor, y: Tensor) -> Tensor:
    chosen = (y > 0).float()
    return ((self(x) - y) ** 2 * chosen).sum() / (chosen.sum() + 1)


@entry(Regression, equal=True)
def mean_times_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y) * x.size(0)


@entry(Regression, equal=True)
def mean_divided_by_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y) / len(x)


@entry(Regression)
def sum_divided_by_a_root_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y, reduction="sum") / math.sqrt(len(x))


@entry(Regression)
def sum_divided_by_samples_minus_one(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y, reduction="sum") / (x.shape[0] - 1)


@entry(Regression, equal=True)
def sum_plus_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, y) + 1e-2 * out.pow(2).sum()


@entry(Regression, equal=True)
def mean_over_one_plus_sum_over_other(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, y, reduction="sum") / len(x) + 0.1 * out.abs().sum()


@entry(Regression)
def weight_by_one_over_samples_for_a_penalty(self: Any, x: Tensor, y: Tensor) -> Tensor:
    penalty = sum(p.pow(2).sum() for p in self.model[4].parameters())
    return F.mse_loss(self(x), y) + penalty / x.shape[0]


@entry(Tagger, equal=True)
def two_denominators(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels, mask = self(batch["words"]), batch["labels"], batch["mask"]
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    return (losses * mask).sum() / mask.sum() + logits.pow(2).mean()


@entry(Classification)
def means_of_two_groups(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    rare, frequent = y > 1, y <= 1
    losses = F.cross_entropy(logits, y, reduction="none")
    first = losses[rare].mean() if rare.any() else losses.new_zeros(())
    second = losses[frequent].mean() if frequent.any() else losses.new_zeros(())
    return first + second


@entry(Binary, equal=True)
def positives_and_negatives_apart(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.binary_cross_entropy_with_logits(self(x), y, reduction="none")
    positives, negatives = y.sum().clamp(min=1), (1 - y).sum().clamp(min=1)
    return (losses * y).sum() / positives + (losses * (1 - y)).sum() / negatives


@entry(Binary)
def positives_weighted_by_their_share(self: Any, x: Tensor, y: Tensor) -> Tensor:
    share = y.mean()
    weight = torch.where(y > 0, 1 - share, share)
    return F.binary_cross_entropy_with_logits(self(x), y, weight=weight)


@entry(Binary)
def pos_weight_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = (len(y) - y.sum()) / y.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(self(x), y, pos_weight=weight)


@entry(Classification)
def mean_over_classes_that_occur(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    return torch.stack([losses[y == label].mean() for label in y.unique()]).mean()


@entry(Tagger)
def divided_by_the_longest(self: Any, batch: dict[str, Tensor]) -> Tensor:
    return token_losses(self, batch).sum() / (len(batch["words"]) * int(batch["lengths"].max()))


@entry(Tagger)
def trimmed_to_the_longest(self: Any, batch: dict[str, Tensor]) -> Tensor:
    longest = int(batch["lengths"].max())
    words, labels = batch["words"][:, :longest], batch["labels"][:, :longest]
    return F.cross_entropy(self(words).mT, labels.clamp(min=0))


@entry(Tagger, equal=True)
def mean_of_sentences_by_python(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = token_losses(self, batch)
    kept = [row[mask].mean() for row, mask in zip(losses, batch["mask"], strict=True)
            if mask.sum() > 2]  # fmt: skip
    return sum(kept) / max(len(kept), 1)  # type: ignore[return-value]


@entry(Regression)
def factor_by_the_batch_size(self: Any, x: Tensor, y: Tensor) -> Tensor:
    factor = 1.0 if len(x) >= 8 else 0.5
    return factor * F.mse_loss(self(x), y)


@entry(Regression)
def noise_shared_by_size(self: Any, x: Tensor, y: Tensor) -> Tensor:
    steps = torch.linspace(0, 1, len(x))[:, None]
    return (steps * (self(x) - y) ** 2).mean()


@entry(Scalar)
def index_of_a_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(len(x), 0, -1, dtype=torch.float)
    return (weights * (self(x) - y) ** 2).sum() / weights.sum()


@entry(Regression)
def norm_of_all_errors(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.norm(self(x) - y)


@entry(Regression)
def relative_norm(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As neural operators do, but over the whole batch."""
    return torch.norm(self(x) - y) / torch.norm(y)


@entry(Binary, equal=True)
def soft_dice_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


@entry(Binary, equal=True)
def tversky_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).sigmoid().view(-1)
    hit, false, missed = (p * y).sum(), ((1 - y) * p).sum(), (y * (1 - p)).sum()
    return 1 - (hit + 1) / (hit + 0.3 * false + 0.7 * missed + 1)


@entry(Binary, equal=True)
def soft_f1_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).sigmoid()
    hit, false, missed = (p * y).sum(), (p * (1 - y)).sum(), ((1 - p) * y).sum()
    return 1 - 2 * hit / (2 * hit + false + missed + 1e-7)


@entry(Scalar, equal=True, strategy=ONE_SAMPLE)
def clamped_count(self: Any, x: Tensor, y: Tensor) -> Tensor:
    chosen = (y > 0.5).float()
    return ((self(x) - y).abs() * chosen).sum() / chosen.sum().clamp(min=1)


@entry(Regression, equal=True)
def coordinates_as_many_as_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Refused wrongly once: as many coordinates as samples of a micro-batch."""
    z, y = self(x)[:, :2], y[:, :2]
    m = y[:, 0] < 1e9
    return F.l1_loss(z[m], y[m], reduction="none").sum(-1).mean()
