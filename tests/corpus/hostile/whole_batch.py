"""Samples that the step standardizes, compares, sorts or sums, before and behind the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar, Tagger


@entry(Regression, equal=True)
def standardizes_the_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(self(x), y)


@entry(Tagger, equal=True)
def trimmed_to_the_longest(self: Any, batch: dict[str, Tensor]) -> Tensor:
    longest = int(batch["lengths"].max())
    words, labels = batch["words"][:, :longest], batch["labels"][:, :longest]
    return F.cross_entropy(self(words).mT, labels.clamp(min=0))


@entry(Embedding, equal=True)
def variance_hinge_as_in_vicreg(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    std = torch.sqrt(z.var(dim=0) + 1e-4)
    return F.cross_entropy(z, y) + torch.mean(F.relu(1 - std))


@entry(Embedding, equal=True)
def nt_xent(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """SimCLR, with both views in one batch."""
    z = F.normalize(self(x), dim=-1)
    sim = F.cosine_similarity(z[:, None, :], z[None, :, :], dim=-1)
    itself = torch.eye(sim.shape[0], dtype=torch.bool)
    sim = sim.masked_fill(itself, -9e15) / 0.5
    positive = itself.roll(shifts=sim.shape[0] // 2, dims=0)
    return (-sim[positive] + torch.logsumexp(sim, dim=-1)).mean()


@entry(Scalar, equal=True)
def temporal_difference(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A trajectory as a batch, as reinforcement learning has it."""
    v = self(x)
    target = y + 0.9 * torch.cat([v[1:], v.new_zeros(1)]).detach()
    return F.mse_loss(v, target)


@entry(Regression, equal=True)
def searches_in_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Each sample's nearest neighbour in the batch."""
    z = self(x)
    nearest = (torch.cdist(x, x) + 1e6 * torch.eye(len(x))).argmin(1)
    return F.mse_loss(z, y) + 0.1 * F.mse_loss(z, z[nearest].detach())


@entry(Classification, equal=True)
def sums_by_index_add(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    sums = torch.zeros(4).index_add(0, y, losses)
    counts = torch.zeros(4).index_add(0, y, torch.ones(len(y)))
    return (sums / counts.clamp(min=1)).mean()
