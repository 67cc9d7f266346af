"""Losses that are functions of means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Classification, Images, Regression, Scalar


@entry(Regression, equal=True)
def root_mean_square(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt(F.mse_loss(self(x), y))


@entry(Regression, equal=True)
def root_mean_square_with_epsilon(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (F.mse_loss(self(x), y) + 1e-6) ** 0.5


@entry(Regression, equal=True)
def logarithm_of_a_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.log(F.mse_loss(self(x), y))


@entry(Classification, equal=True)
def exponential_of_a_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x), y).exp()


@entry(Regression, equal=True)
def signal_to_noise(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return -10 * torch.log10(1 / F.mse_loss(self(x), y))


@entry(Classification, equal=True)
def focal_of_the_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The popular mistake: the focal factor of the mean instead of each sample's."""
    ce = F.cross_entropy(self(x), y)
    pt = torch.exp(-ce)
    return (1 - pt) ** 2 * ce


@entry(Binary, equal=True)
def binary_focal_of_the_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    bce = F.binary_cross_entropy_with_logits(self(x), y)
    return 0.25 * (1 - torch.exp(-bce)).pow(2) * bce


@entry(Regression, equal=True)
def flooding(self: Any, x: Tensor, y: Tensor) -> Tensor:
    b = 1.2
    return (F.mse_loss(self(x), y) - b).abs() + b


@entry(Regression, equal=True)
def product_of_two_means(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, y) * F.l1_loss(out, y)


@entry(Regression, equal=True)
def ratio_of_two_means(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, y) / y.pow(2).mean()


@entry(Scalar, equal=True)
def ratio_of_sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The weighted absolute percentage error."""
    return (self(x) - y).abs().sum() / y.abs().sum()


@entry(Scalar, equal=True)
def square_of_the_mean_error(self: Any, x: Tensor, y: Tensor) -> Tensor:
    error = self(x) - y
    return error.pow(2).mean() + error.mean() ** 2


@entry(Scalar, equal=True)
def scale_invariant_logarithm(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of depth estimation, over the batch."""
    d = self(x) - y
    return torch.sqrt((d**2).mean() - 0.85 * d.mean() ** 2)


@entry(Regression, equal=True)
def uncertainty_by_maximum(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    losses = torch.stack([F.mse_loss(out[:, i], y[:, i]) for i in range(3)])
    return losses.max()


@entry(Regression, equal=True)
def softmax_of_losses(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    losses = torch.stack([F.mse_loss(out[:, i], y[:, i]) for i in range(3)])
    return (losses.softmax(0).detach() * losses).sum()


@entry(Regression, equal=True)
def geometric_mean_of_losses(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    losses = [F.mse_loss(out[:, i], y[:, i]) for i in range(3)]
    return (losses[0] * losses[1] * losses[2]) ** (1 / 3)


@entry(Regression, equal=True)
def weights_of_detached_losses(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    first, second = F.mse_loss(out, y), F.l1_loss(out, y)
    return first + first.detach() / second.detach() * second


@entry(Regression, equal=True)
def minimum_of_two_means(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return torch.minimum(F.mse_loss(out, y), F.mse_loss(-out, y))


@entry(Regression, equal=True)
def distance_of_means(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x).mean(0) - y.mean(0)).pow(2).sum()


@entry(Images)
def norm_of_the_mean_gram_matrix(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    gram = torch.einsum("bi,bj->ij", out, out) / len(out)
    return F.cross_entropy(out, y) + gram.pow(2).mean()


@entry(Regression, equal=True)
def clamps_a_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y).clamp(max=1.5)


@entry(Regression, equal=True)
def free_bits_of_the_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, y) + torch.clamp(out.pow(2).mean(0), min=0.2).sum()


@entry(Regression, equal=True)
def relu_of_a_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.l1_loss(out, y) + F.relu(out.abs().mean() - 0.3)
