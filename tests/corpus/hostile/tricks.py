"""Tricks of published modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Embedding, Images, Regression, Scalar


@entry(Embedding)
def prototypes_of_support_and_query(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """ProtoNet: the first half of a batch makes prototypes for the second."""
    z = self(x)
    (support, query), (ys, yq) = z.chunk(2, dim=0), y.chunk(2, dim=0)
    classes = torch.unique(ys)
    prototypes = torch.stack([support[ys == c].mean(0) for c in classes])
    distance = torch.pow(prototypes[None] - query[:, None], 2).sum(2)
    target = (classes[None] == yq[:, None]).float()
    return -(F.log_softmax(-distance, 1) * target).sum() / len(query)


@entry(Embedding)
def difference_to_the_next(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return (z - z.roll(1, 0)).pow(2).mean() + F.cross_entropy(z, y)


@entry(Embedding)
def indexes_by_label(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    index = y.argsort(stable=True)
    return F.mse_loss(z, z[index])


@entry(Embedding)
def all_pairs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.softplus(1 - (z[None] - z[:, None]).norm(dim=-1)).mean()


@entry(Embedding)
def mean_of_a_chunk(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    prototype = z.chunk(2)[0].mean(0)
    return (z - prototype).pow(2).mean()


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


@entry(Embedding)
def sinkhorn(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """SwAV assigns codes to the samples of a batch together."""
    scores = self(x)
    with torch.no_grad():
        q = torch.exp(scores / 0.5).T
        q /= q.sum()
        for _ in range(3):
            q /= q.sum(1, keepdim=True) * q.shape[0]
            q /= q.sum(0, keepdim=True) * q.shape[1]
        q = (q * q.shape[1]).T
    return -(q * scores.log_softmax(1)).sum(1).mean()


@entry(Scalar)
def generalized_advantage(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """PPO standardizes the advantages of a batch."""
    value = self(x)
    advantage = (y - value).detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return F.mse_loss(value, y) - 0.1 * (advantage * value).mean()


@entry(Scalar)
def reinforce_with_a_baseline(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logp = F.logsigmoid(self(x))
    return -((y - y.mean()) * logp).mean()


@entry(Scalar)
def discounted_returns(self: Any, x: Tensor, y: Tensor) -> Tensor:
    returns: list[Tensor] = []
    total = torch.zeros(())
    for reward in reversed(y):
        total = reward + 0.9 * total
        returns.insert(0, total)
    return F.mse_loss(self(x), torch.stack(returns))


@entry(Images)
def batch_hard_by_python(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    losses = []
    for i in range(len(z)):
        for j in range(i + 1, len(z)):
            d = (z[i] - z[j]).pow(2).sum()
            losses.append(d if y[i] == y[j] else F.relu(1 - d))
    return torch.stack(losses).mean()


@entry(Embedding)
def energy_of_real_and_fake_halves(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Energy models put real and sampled inputs into one batch."""
    real, fake = self(x).mean(-1).chunk(2, dim=0)
    regular = 0.1 * (real**2 + fake**2).mean()
    return regular + fake.mean() - real.mean()


@entry(Regression)
def style_by_gram_matrices(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    a, b = out.T @ out, y.T @ y
    return F.mse_loss(a / out.numel(), b / y.numel())


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


@entry(Scalar)
def distance_correlation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    a = (s[:, None] - s[None]).abs()
    b = (y[:, None] - y[None]).abs()
    a = a - a.mean(0) - a.mean(1, keepdim=True) + a.mean()
    b = b - b.mean(0) - b.mean(1, keepdim=True) + b.mean()
    return 1 - (a * b).mean() / ((a * a).mean() * (b * b).mean()).sqrt()
