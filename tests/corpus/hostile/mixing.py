"""Samples mixed with each other: rolls, flips, halves, mixup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar


@entry(Classification)
def manifold_mixup_of_outputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    logits = 0.5 * (logits + logits.flip(0))
    return F.cross_entropy(logits, y)


@entry(Embedding)
def negatives_by_index(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    others = (torch.arange(len(z)) + 1) % len(z)
    return F.triplet_margin_loss(z, z + 0.1, z[others])


@entry(Embedding)
def negatives_by_cat(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    shifted = torch.cat([z[1:], z[:1]])
    return F.cosine_embedding_loss(z, shifted, torch.where(y == y.roll(-1), 1, -1))


@entry(Embedding)
def negatives_by_gather(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    index = torch.arange(len(z)).flip(0)[:, None].expand_as(z)
    return (z - z.gather(0, index)).pow(2).mean() + F.cross_entropy(z, y)


@entry(Embedding)
def negatives_by_index_select(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return (z * z.index_select(0, torch.arange(len(z) - 1, -1, -1))).sum(-1).mean()


@entry(Scalar)
def temporal_difference(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A trajectory as a batch, as reinforcement learning has it."""
    v = self(x)
    target = y + 0.9 * torch.cat([v[1:], v.new_zeros(1)]).detach()
    return F.mse_loss(v, target)


@entry(Regression)
def adds_the_first_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z + 0.5 * z[0], y)


@entry(Regression)
def convolves_over_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    smooth = F.avg_pool1d(z.T[None], 3, 1, 1)[0].T
    return F.mse_loss(smooth, y)


@entry(Regression)
def unfolds_windows_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z.unfold(0, 2, 1).mean(-1), y[:-1])


@entry(Regression)
def pads_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.pad(self(x), (0, 0, 1, 0))[:-1]
    return F.mse_loss(z, y)
