"""Losses of detection, segmentation, regression and ranking, as papers' code writes them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import (
    CLASSES,
    Binary,
    Classification,
    Embedding,
    Labels,
    Regression,
    Segmentation,
    Sequences,
)


@entry(Classification)
def focal(self: Any, x: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(self(x), y, reduction="none")
    pt = torch.exp(-ce)
    return ((1 - pt) ** 2 * ce).mean()


@entry(Labels)
def retina_net_by_positives(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Focal losses summed over all anchors, divided by the number of positive ones."""
    logits = self(x)
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    pt = p * y + (1 - p) * (1 - y)
    return (ce * (1 - pt) ** 2).sum() / y.sum().clamp(min=1)


@entry(Segmentation)
def dice_of_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).softmax(1)
    hot = F.one_hot(y, 3).permute(0, 3, 1, 2).float()
    hit, total = (p * hot).sum((2, 3)), (p + hot).sum((2, 3))
    return (1 - (2 * hit + 1) / (total + 1)).mean()


@entry(Segmentation)
def structural_similarity(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = self(x)[:, :1], y[:, None].float()
    ma, mb = F.avg_pool2d(a, 3, 1), F.avg_pool2d(b, 3, 1)
    va, vb = F.avg_pool2d(a * a, 3, 1) - ma**2, F.avg_pool2d(b * b, 3, 1) - mb**2
    cov = F.avg_pool2d(a * b, 3, 1) - ma * mb
    ssim = (2 * ma * mb + 0.01) * (2 * cov + 0.03) / ((ma**2 + mb**2 + 0.01) * (va + vb + 0.03))
    return 1 - ssim.mean()


@entry(Segmentation)
def gradients_of_images(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out, target = self(x)[:, 0], y.float()
    dx = out.diff(dim=-1) - target.diff(dim=-1)
    dy = out.diff(dim=-2) - target.diff(dim=-2)
    return F.l1_loss(out, target) + dx.abs().mean() + dy.abs().mean()


class Boxes(Regression):
    """Boxes of one object an image."""

    outputs = 4

    @classmethod
    def dataset(cls, seed: int) -> Any:
        x, y = Regression.dataset(seed).tensors
        corner = y[:, :2]
        return torch.utils.data.TensorDataset(
            x, torch.cat([corner, corner + 1 + y[:, 2:].abs()], 1)
        )

    def boxes(self, x: Tensor) -> Tensor:
        out = self(x)
        return torch.cat([out[:, :2], out[:, :2] + F.softplus(out[:, 2:])], 1)


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:])
    hit = (high - low).clamp(min=0).prod(1)
    areas = (a[:, 2:] - a[:, :2]).prod(1) + (b[:, 2:] - b[:, :2]).prod(1)
    return hit, areas - hit


@entry(Boxes)
def intersection_over_union(self: Any, x: Tensor, y: Tensor) -> Tensor:
    hit, union = _overlap(self.boxes(x), y)
    return (1 - hit / (union + 1e-7)).mean()


@entry(Regression)
def pinball_of_quantiles(self: Any, x: Tensor, y: Tensor) -> Tensor:
    error = y[:, :1] - self(x)
    q = torch.tensor([0.1, 0.5, 0.9])
    return torch.max(q * error, (q - 1) * error).mean()


@entry(Regression)
def mixture_density(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    pi = F.log_softmax(out[:, :2], -1)
    mu = torch.stack([out[:, 2], -out[:, 2]], 1)
    logp = -0.5 * (y[:, :1] - mu) ** 2 - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(pi + logp, 1).mean()


@entry(Regression)
def normal_distribution(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    d = torch.distributions.Normal(out[:, 0], F.softplus(out[:, 1]) + 0.1)
    return -d.log_prob(y[:, 0]).mean()


@entry()
class DistillsATeacher(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, CLASSES).requires_grad_(False).eval()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return -(target * self(x).log_softmax(-1)).sum(-1).mean()


@entry()
class ArcFace(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self(x)), F.normalize(self.weight))
        theta = torch.acos(cosine.clamp(-0.999, 0.999))
        margin = F.one_hot(y, CLASSES) * 0.2
        return F.cross_entropy(8 * torch.cos(theta + margin), y)


@entry()
class Proxies(Embedding):
    """Proxy-NCA."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, p = F.normalize(self(x), dim=1), F.normalize(self.proxies, dim=1)
        distance = torch.cdist(z, p).pow(2)
        return F.cross_entropy(-distance, y)


@entry()
class UncertaintyWeights(Regression):
    """Multi-task losses weighted by learned variances."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, total = self(x), torch.zeros(())
        for number in range(3):
            precision = torch.exp(-self.log_vars[number])
            loss = F.mse_loss(out[:, number], y[:, number])
            total = total + precision * loss + self.log_vars[number]
        return total


@entry(Binary)
def weighted_mean_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = 1 + x[:, 1].abs()
    losses = F.binary_cross_entropy_with_logits(self(x), y, reduction="none")
    return (weight * losses).sum() / weight.sum()


@entry(Labels)
def ordinal_regression(self: Any, x: Tensor, y: Tensor) -> Tensor:
    levels = (y.sum(1, keepdim=True) > torch.arange(4)).float()
    logits = self(x)
    return (
        -(F.logsigmoid(logits) * levels + (F.logsigmoid(logits) - logits) * (1 - levels))
        .sum(1)
        .mean()
    )


@entry(Sequences)
def mean_over_time_and_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((self(x) - y) ** 2).mean(dim=(1, 2)).mean()


@entry(Sequences)
def weighted_over_time(self: Any, x: Tensor, y: Tensor) -> Tensor:
    decay = 0.9 ** torch.arange(x.size(1)).float()
    return ((self(x) - y) ** 2 * decay[None, :, None]).sum() / (decay.sum() * len(x) * 2)


@entry(Sequences)
def standardizes_each_series(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
    out = self((x - mean) / std) * std + mean
    return F.mse_loss(out, y)


@entry(Sequences)
def spectral(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.fft.rfft(self(x), dim=1), torch.fft.rfft(y, dim=1)
    return F.mse_loss(torch.view_as_real(a), torch.view_as_real(b))


@entry(Labels)
def mean_reciprocal_rank_of_each_sample(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    scores = self(x)
    rank = (scores[:, 1:] >= scores[:, :1]).sum(1) + 1
    self.log("mrr", (1.0 / rank).mean())
    return F.binary_cross_entropy_with_logits(scores, y)
