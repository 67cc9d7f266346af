"""Random numbers: steps that are wrong in micro-batches, and draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression, Scalar


@entry(Classification)
def mixup_by_a_permutation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = float(np.random.beta(1.0, 1.0))
    index = torch.randperm(x.size(0))
    logits = self(weight * x + (1 - weight) * x[index])
    return weight * F.cross_entropy(logits, y) + (1 - weight) * F.cross_entropy(logits, y[index])


@entry(Classification)
def mixup_by_torch_beta(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.distributions.Beta(0.4, 0.4).sample()
    index = torch.randperm(len(x))
    target = F.one_hot(y, 4).float()
    target = weight * target + (1 - weight) * target[index]
    logits = self(weight * x + (1 - weight) * x[index])
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


@entry(Embedding)
def negatives_by_a_permutation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.triplet_margin_loss(z, z + 0.1, z[torch.randperm(len(z))])


@entry(Scalar)
def mutual_information_by_shuffling(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """MINE: the marginal by shuffled targets, a logarithm of a mean of exponentials."""
    t = self(x) * y
    shuffled = self_values(t, y[torch.randperm(len(y))])
    return -(t.mean() - torch.logsumexp(shuffled, 0))


def self_values(t: Tensor, y: Tensor) -> Tensor:
    return t.detach() * y


@entry(Regression)
def noise_then_standardizes(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x) + 0.01 * torch.randn(len(x), 3)
    return F.mse_loss((z - z.mean(0)) / (z.std(0) + 1e-3), y)


@entry(Embedding)
def simclr_with_noise_as_augmentation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(self(x + 0.05 * torch.randn_like(x)), dim=-1)
    sim = z @ z.T / 0.2
    return (sim - 1e3 * torch.eye(len(z))).logsumexp(1).mean()


@entry(Regression)
def random_half_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    chosen = torch.randperm(len(x))[: len(x) // 2 + 1]
    z = self(x)
    return F.mse_loss(z[chosen], y[chosen], reduction="sum") / len(x)


@entry(Regression)
def one_random_number_decides(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z, y) / y.std() if torch.rand(()) < 2 else z.sum()


@entry(Regression)
def noise_of_the_batchs_scale(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x + 0.1 * x.std() * torch.randn_like(x)), y)


@entry(Regression, equal=True)
def root_of_a_noisy_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x + 0.1 * torch.randn_like(x)), y).sqrt()


@entry(Regression, equal=True)
def variational_autoencoder_with_sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Adds a mean over samples to a sum, and draws."""
    mu = self(x)
    z = mu + 0.1 * torch.randn_like(mu)
    return F.mse_loss(z, y) + 1e-2 * mu.pow(2).sum()


@entry(Regression)
def numpy_permutation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    order = torch.from_numpy(np.random.permutation(len(x)))
    z = self(x)
    return F.mse_loss(z, y) + 0.1 * F.mse_loss(z, z[order])
