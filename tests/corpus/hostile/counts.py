"""Counts of samples, and denominators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Tagger

ONE_SAMPLE = {"microbatches": None}
"""Of a batch of eight, two stages make micro-batches of one sample by default."""


@entry(Tagger, equal=True)
def two_denominators(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels, mask = self(batch["words"]), batch["labels"], batch["mask"]
    losses = F.cross_entropy(logits.mT, labels, reduction="none")
    return (losses * mask).sum() / mask.sum() + logits.pow(2).mean()


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


@entry(Tagger)
def trimmed_to_the_longest(self: Any, batch: dict[str, Tensor]) -> Tensor:
    longest = int(batch["lengths"].max())
    words, labels = batch["words"][:, :longest], batch["labels"][:, :longest]
    return F.cross_entropy(self(words).mT, labels.clamp(min=0))
