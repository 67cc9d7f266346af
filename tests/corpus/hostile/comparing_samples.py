"""Samples compared with each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Embedding, Scalar


@entry(Embedding)
def nt_xent(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """SimCLR, with both views in one batch."""
    z = F.normalize(self(x), dim=-1)
    sim = F.cosine_similarity(z[:, None, :], z[None, :, :], dim=-1)
    itself = torch.eye(sim.shape[0], dtype=torch.bool)
    sim = sim.masked_fill(itself, -9e15) / 0.5
    positive = itself.roll(shifts=sim.shape[0] // 2, dims=0)
    return (-sim[positive] + torch.logsumexp(sim, dim=-1)).mean()


@entry(Embedding)
def maximum_mean_discrepancy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    other = torch.zeros_like(z) + torch.linspace(-1, 1, len(z))[:, None]
    both = torch.cat([z, other])
    l2 = (both.unsqueeze(0) - both.unsqueeze(1)).pow(2).sum(2)
    kernels = torch.exp(-l2)
    n = len(z)
    return (kernels[:n, :n] + kernels[n:, n:] - 2 * kernels[:n, n:]).mean()


@entry(Embedding)
def repeats_and_compares(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    n = len(z)
    a, b = z.repeat(n, 1), z.repeat_interleave(n, 0)
    return F.pairwise_distance(a, b).mean() + F.cross_entropy(z, y)


@entry(Scalar)
def ranknet(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    i, j = torch.combinations(torch.arange(len(s))).T
    return F.binary_cross_entropy_with_logits(s[i] - s[j], (y[i] > y[j]).float())


@entry(Scalar)
def bayesian_personalized_ranking(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    positive, negative = s[y > 0], s[y <= 0]
    if len(positive) == 0 or len(negative) == 0:
        return s.sum() * 0
    return -F.logsigmoid(positive[:, None] - negative[None]).mean()


@entry(Embedding)
def center_loss_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    centers = torch.stack([z[y == label].mean(0) for label in range(4) if (y == label).any()])
    return F.cross_entropy(z, y) + 0.1 * torch.cdist(z, centers).min(1).values.mean()


@entry(Embedding)
def kronecker(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return torch.kron(z, z).pow(2).mean() + F.cross_entropy(z, y)
