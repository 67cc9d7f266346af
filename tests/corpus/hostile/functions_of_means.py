"""Losses that are functions of means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Regression, Scalar


@entry(Regression, equal=True)
def root_mean_square(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(F.mse_loss(self(x), y))


@entry(Regression, equal=True)
def signal_to_noise(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return -10 * torch.log10(1 / F.mse_loss(self(x), y))


@entry(Binary, equal=True)
def binary_focal_of_the_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(self(x), y)
    return 0.25 * (1 - torch.exp(-bce)).pow(2) * bce


@entry(Scalar, equal=True)
def ratio_of_sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The weighted absolute percentage error."""
    return (self(x) - y).abs().sum() / y.abs().sum()


@entry(Regression, equal=True)
def minimum_of_two_means(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return torch.minimum(F.mse_loss(out, y), F.mse_loss(-out, y))


@entry(Regression, equal=True)
def relu_of_a_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.l1_loss(out, y) + F.relu(out.abs().mean() - 0.3)
