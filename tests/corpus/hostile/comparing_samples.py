"""Samples compared with each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Embedding, Regression, Scalar


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
def info_nce_of_two_halves(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(self(x), dim=-1).chunk(2)
    logits = a @ b.T / 0.1
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@entry(Embedding)
def clip_of_two_towers(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a = F.normalize(self(x), dim=-1)
    b = F.normalize(x[:, :5], dim=-1)
    logits = 10 * torch.einsum("nd,md->nm", a, b)
    return F.cross_entropy(logits, torch.arange(len(x)))


@entry(Embedding)
def supervised_contrastive(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(self(x), dim=-1)
    sim = torch.matmul(z, z.T) / 0.5
    same = (y[:, None] == y[None]).float() - torch.eye(len(y))
    logp = sim - torch.log(torch.exp(sim).sum(1, keepdim=True))
    return -((same * logp).sum(1) / same.sum(1).clamp(min=1)).mean()


@entry(Embedding)
def triplet_of_the_hardest(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    d = torch.cdist(z, z)
    same = y[:, None] == y[None]
    positive = (d * same).max(1).values
    negative = (d + 1e3 * same).min(1).values
    return F.relu(positive - negative + 0.5).mean()


@entry(Embedding)
def distances_by_pdist(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Uniformity on the sphere."""
    z = F.normalize(self(x), dim=1)
    return torch.pdist(z, p=2).pow(2).mul(-2).exp().mean().log()


@entry(Embedding)
def gram_by_linear(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.linear(z, z).logsumexp(1).mean()


@entry(Embedding)
def gram_by_inner(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(self(x), dim=-1)
    return torch.inner(z, z).triu(1).pow(2).mean()


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
def mmd_with_a_bandwidth_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    l2 = (z[None] - z[:, None]).pow(2).sum(-1)
    bandwidth = l2.detach().sum() / (len(z) ** 2 - len(z))
    return torch.exp(-l2 / bandwidth).mean() + F.cross_entropy(z, y)


@entry(Embedding)
def differences_by_broadcasting(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return (z[None] - z[:, None]).pow(2).sum(-1).mean()


@entry(Embedding)
def repeats_and_compares(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    n = len(z)
    a, b = z.repeat(n, 1), z.repeat_interleave(n, 0)
    return F.pairwise_distance(a, b).mean() + F.cross_entropy(z, y)


@entry(Embedding)
def barlow_twins(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z1 = self(x)
    z2 = z1.tanh()
    z1, z2 = (z1 - z1.mean(0)) / z1.std(0), (z2 - z2.mean(0)) / z2.std(0)
    c = z1.T @ z2 / len(x)
    on = (torch.diagonal(c) - 1).pow(2).sum()
    return on + 5e-3 * (c - torch.diag(torch.diagonal(c))).pow(2).sum()


@entry(Scalar)
def margin_ranking_of_all_pairs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    gaps, signs = s[:, None] - s[None], (y[:, None] - y[None]).sign()
    return F.relu(0.1 - signs * gaps).mean()


@entry(Scalar)
def margin_ranking_of_neighbours(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    return F.margin_ranking_loss(s[:-1], s[1:], (y[:-1] - y[1:]).sign())


@entry(Scalar)
def pairs_of_even_and_odd(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Pairs inside a micro-batch of two samples, so a micro-batch has the same; here of three."""
    s = self(x)
    return F.softplus(-(s[::3] - s.mean()) * y[::3].sign()).mean()


@entry(Scalar)
def ranknet(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    i, j = torch.combinations(torch.arange(len(s))).T
    return F.binary_cross_entropy_with_logits(s[i] - s[j], (y[i] > y[j]).float())


@entry(Scalar)
def listwise_softmax(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    return -(F.softmax(y, 0) * F.log_softmax(s, 0)).sum()


@entry(Scalar)
def bayesian_personalized_ranking(self: Any, x: Tensor, y: Tensor) -> Tensor:
    s = self(x)
    positive, negative = s[y > 0], s[y <= 0]
    if len(positive) == 0 or len(negative) == 0:
        return s.sum() * 0
    return -F.logsigmoid(positive[:, None] - negative[None]).mean()


@entry(Embedding)
def attention_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    z = z + F.scaled_dot_product_attention(z[None], z[None], z[None])[0]
    return F.cross_entropy(z, y)


@entry(Embedding)
def center_loss_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    centers = torch.stack([z[y == label].mean(0) for label in range(4) if (y == label).any()])
    return F.cross_entropy(z, y) + 0.1 * torch.cdist(z, centers).min(1).values.mean()


@entry(Embedding)
def gram_by_einsum_of_one_letter_more(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return torch.einsum("id,jd->ij", z, z).tanh().mean()


@entry(Embedding)
def gram_by_tensordot(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return torch.tensordot(z, z, dims=([1], [1])).exp().mean().log()


@entry(Embedding)
def gram_by_bmm(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)[None]
    return torch.bmm(z, z.transpose(1, 2)).pow(2).mean()


@entry(Embedding)
def gram_by_addmm(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return torch.addmm(torch.eye(len(z)), z, z.T, alpha=-1).pow(2).mean()


@entry(Embedding)
def gram_by_multiplying_and_summing(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return (z.unsqueeze(1) * z.unsqueeze(0)).sum(-1).pow(2).mean()


@entry(Embedding)
def kronecker(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return torch.kron(z, z).pow(2).mean() + F.cross_entropy(z, y)


@entry(Regression)
def optimal_transport_in_one_dimension(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x).sort(0).values - y.sort(0).values).pow(2).mean()
