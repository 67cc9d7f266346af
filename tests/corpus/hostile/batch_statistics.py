"""Statistics over the samples of a batch, in the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar


@entry(Regression)
def standardizes_the_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(self(x), y)


@entry(Regression)
def scales_by_aminmax(self: Any, x: Tensor, y: Tensor) -> Tensor:
    low, high = torch.aminmax(x, dim=0)
    return F.mse_loss(self((x - low) / (high - low)), y)


@entry(Regression)
def normalizes_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.normalize(self(x), dim=0), F.normalize(y, dim=0))


@entry(Regression)
def normalizes_a_mean_by_var_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    var, mean = torch.var_mean(out, dim=0, unbiased=False)
    return F.mse_loss((out - mean) * torch.rsqrt(var + 1e-5), y)


@entry(Regression)
def normalizes_a_mean_by_std_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    std, mean = torch.std_mean(y, dim=0)
    return F.mse_loss(self(x), (y - mean) / std)


@entry(Embedding)
def variance_hinge_as_in_vicreg(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    std = torch.sqrt(z.var(dim=0) + 1e-4)
    return F.cross_entropy(z, y) + torch.mean(F.relu(1 - std))


@entry(Scalar)
def median_of_errors(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x) - y).abs().median()


@entry(Scalar)
def threshold_of_berhu(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The reversed Huber loss: its threshold is a fifth of the largest error."""
    error = (self(x) - y).abs()
    c = 0.2 * error.max().detach()
    return torch.where(error <= c, error, (error**2 + c**2) / (2 * c)).mean()


@entry(Classification)
def class_weights_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=4).float()
    weights = counts.sum() / (counts + 1)
    return F.cross_entropy(self(x), y, weight=weights)


@entry(Classification, equal=True)
def balance_of_predictions(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, y) + (mean * mean.log()).sum()


@entry(Classification)
def softmax_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    attention = torch.softmax(logits.max(-1).values, dim=0)
    return (attention * F.cross_entropy(logits, y, reduction="none")).sum()


@entry(Classification)
def hardest_by_a_threshold_of_their_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    return losses[losses > losses.mean()].mean()


@entry(Scalar)
def log_of_the_mean_of_exponentials(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y) ** 2
    return torch.logsumexp(errors, 0)
