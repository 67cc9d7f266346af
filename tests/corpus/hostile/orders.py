"""Sorting, cumulative and scattering operations over the samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar


@entry(Scalar)
def cumulative_maximum(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x).cummax(0).values, y)


@entry(Scalar)
def cumulative_product(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss((0.5 + self(x).sigmoid()).cumprod(0), y)


@entry(Scalar)
def lambda_rank(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    order = s.argsort(descending=True)
    gains = (2 ** y.clamp(0, 3) - 1)[order]
    discounts = torch.log2(torch.arange(len(s)) + 2.0)
    return -(gains / discounts * s[order]).sum() / gains.sum().clamp(min=1)


@entry(Classification, equal=True)
def sums_by_index_add(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    sums = torch.zeros(4).index_add(0, y, losses)
    counts = torch.zeros(4).index_add(0, y, torch.ones(len(y)))
    return (sums / counts.clamp(min=1)).mean()


@entry(Classification)
def means_by_scatter_reduce(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    zeros = torch.zeros(4)
    return zeros.scatter_reduce(0, y, losses, "mean", include_self=False).mean()


@entry(Classification, equal=True)
def sums_by_scatter_add(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    return torch.zeros(4).scatter_add(0, y, losses).pow(2).mean()


@entry(Embedding)
def prototypes_by_index_put(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    sums = torch.zeros(4, 5).index_put((y,), z, accumulate=True)
    return torch.cdist(z, sums).pow(2).mean()


@entry(Scalar, equal=True)
def histogram_of_outputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    bins = torch.linspace(-2, 2, 5)
    soft = torch.exp(-((s[:, None] - bins) ** 2)).sum(0)
    share = soft / soft.sum()
    return F.mse_loss(s, y) - 0.5 * (share * share.log()).sum()


@entry(Scalar)
def calibration_by_bins(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p, hit = self(x).sigmoid(), (y > 0).float()
    bins = torch.bucketize(p.detach(), torch.tensor([0.45, 0.5, 0.55]))
    gaps = [(p[bins == b].mean() - hit[bins == b].mean()).abs() * (bins == b).float().mean()
            for b in range(4) if (bins == b).any()]  # fmt: skip
    return F.binary_cross_entropy(p, hit) + torch.stack(gaps).sum()


@entry(Scalar)
def kth_value(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x) - y).abs().kthvalue(len(x) // 2 + 1).values


@entry(Regression)
def searches_in_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Each sample's nearest neighbour in the batch."""
    z = self(x)
    nearest = (torch.cdist(x, x) + 1e6 * torch.eye(len(x))).argmin(1)
    return F.mse_loss(z, y) + 0.1 * F.mse_loss(z, z[nearest].detach())
