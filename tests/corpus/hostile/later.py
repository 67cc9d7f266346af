"""Steps whose first batch is right in micro-batches, and whose later ones are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Scalar, Tagger

ONE_SAMPLE = {"microbatches": None}
"""Of a batch of eight, two stages make micro-batches of one sample by default."""


@entry(Regression)
def decides_late(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """The first batch takes one way in all micro-batches, the next does not."""
    x, y = batch
    loss = F.mse_loss(self(x), y)
    if batch_idx > 0 and loss.item() > 2.6:
        loss = loss * 0.1
    return loss


@entry(Scalar, strategy=ONE_SAMPLE, equal=True)
def few_are_chosen_later(self: Any, x: Tensor, y: Tensor) -> Tensor:
    chosen = y > 2.0
    return ((self(x) - y).abs() * chosen).sum() / max(1, int(chosen.sum()))


@entry(Tagger)
def is_trimmed_later(self: Any, batch: dict[str, Tensor]) -> Tensor:
    longest = batch["mask"].sum(1).max()
    words = batch["words"][:, :longest]
    return self(words).pow(2).mean()


@entry(Regression, equal=True)
def constant_that_looks_like_a_count(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A number that is as large as a micro-batch, in the second batch."""
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("scaled", loss / (batch_idx + 1))
    return loss / (batch_idx + 1)


@entry(Regression)
def starts_to_compare_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A term that a schedule adds after some steps."""
    z = self(x)
    loss = F.mse_loss(z, y)
    if self.global_step >= 1:
        loss = loss + 0.1 * torch.cdist(z, z).mean()
    return loss
