"""Tricks of published modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Embedding, Regression


@entry(Embedding)
def redundancy_reduction_with_batch_norm(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Barlow Twins with a function instead of a layer."""
    z = self(x)
    a = F.batch_norm(z, None, None, training=True)
    c = a.T @ a / len(a)
    return (c - torch.eye(5)).pow(2).mean()


@entry(Embedding)
def vicreg(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    other = z.detach().roll(1, 1)
    centred = z - z.mean(0)
    std = torch.sqrt(centred.var(0) + 1e-4)
    cov = centred.T @ centred / (len(z) - 1)
    off = cov.pow(2).sum() - cov.diagonal().pow(2).sum()
    return 25 * F.mse_loss(z, other) + 25 * F.relu(1 - std).mean() + off / 5


@entry(Regression)
def fairness_between_groups(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    group = x[:, 0] > 0
    if group.all() or not group.any():
        return F.mse_loss(out, y)
    return F.mse_loss(out, y) + (out[group].mean() - out[~group].mean()).abs()


@entry(Regression)
def deep_coral(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    source, target = out.chunk(2)
    gap = torch.cov(source.T) - torch.cov(target.T)
    return F.mse_loss(source, y[: len(source)]) + gap.pow(2).sum() / 36
