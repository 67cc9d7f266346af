"""Steps whose first batch is right in micro-batches, and whose later ones are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.hostile.counts import ONE_SAMPLE, token_losses
from tests.corpus.modules import Regression, Scalar, Tagger


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


@entry(Tagger)
def leaves_a_sentence_out_later(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = token_losses(self, batch)
    kept = [row[mask].mean() for row, mask in zip(losses, batch["mask"], strict=True)
            if mask.sum() > 1]  # fmt: skip
    return sum(kept) / max(len(kept), 1)  # type: ignore[return-value]


@entry(Scalar)
def bins_that_differ_later(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p, hit = self(x).sigmoid(), (y > 0).float()
    bins = torch.bucketize(p.detach(), torch.tensor([0.4, 0.5, 0.6]))
    gaps = [(p[bins == b].mean() - hit[bins == b].mean()).abs() * (bins == b).float().mean()
            for b in range(4) if (bins == b).any()]  # fmt: skip
    return F.binary_cross_entropy(p, hit) + torch.stack(gaps).sum()


@entry(Regression, equal=True)
def constant_that_looks_like_a_count(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A number that is as large as a micro-batch, in the second batch."""
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("scaled", loss / (batch_idx + 1))
    return loss / (batch_idx + 1)


@entry(Regression)
def starts_to_compare_samples(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A term that a schedule adds after some steps."""
    x, y = batch
    z = self(x)
    loss = F.mse_loss(z, y)
    if self.global_step >= 1:
        loss = loss + 0.1 * torch.cdist(z, z).mean()
    return loss


@entry(Regression)
def starts_to_standardize(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    if batch_idx > 0:
        x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(self(x), y)


@entry(Regression, equal=True)
def logs_every_second_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """A value that the first batch does not log."""
    x, y = batch
    z = self(x)
    if batch_idx % 2:
        self.log("worst", (z - y).abs().max())
    return F.mse_loss(z, y)
