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
    Images,
    Labels,
    Regression,
    Scalar,
    Segmentation,
    Sequences,
)


@entry(Classification)
def focal(self: Any, x: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(self(x), y, reduction="none")
    pt = torch.exp(-ce)
    return ((1 - pt) ** 2 * ce).mean()


@entry(Labels)
def sigmoid_focal(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    pt = p * y + (1 - p) * (1 - y)
    alpha = 0.25 * y + 0.75 * (1 - y)
    return (alpha * ce * (1 - pt) ** 2).mean(1).sum() / len(y)


@entry(Labels)
def asymmetric(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).sigmoid()
    negative = (1 - p + 0.05).clamp(max=1)
    loss = y * p.clamp(min=1e-8).log() + (1 - y) * negative.clamp(min=1e-8).log()
    pt = p * y + negative * (1 - y)
    return -(loss * (1 - pt) ** (1 * y + 4 * (1 - y))).sum(-1).mean()


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
def jaccard_of_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)[:, 0].sigmoid()
    truth = (y > 0).float()
    hit = (p * truth).sum((-1, -2))
    union = (p + truth - p * truth).sum((-1, -2))
    return 1 - ((hit + 1) / (union + 1)).mean()


@entry(Segmentation)
def tversky_of_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p, truth = self(x)[:, 0].sigmoid().flatten(1), (y > 0).float().flatten(1)
    hit = (p * truth).sum(1)
    false, missed = (p * (1 - truth)).sum(1), ((1 - p) * truth).sum(1)
    return (1 - hit / (hit + 0.3 * false + 0.7 * missed + 1e-6)).pow(0.75).mean()


@entry(Segmentation)
def dice_and_cross_entropy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    p, hot = logits.softmax(1), F.one_hot(y, 3).permute(0, 3, 1, 2)
    dice = 1 - 2 * (p * hot).sum((1, 2, 3)) / (p + hot).sum((1, 2, 3))
    return F.cross_entropy(logits, y) + dice.mean()


@entry(Segmentation)
def ignores_a_border(self: Any, x: Tensor, y: Tensor) -> Tensor:
    y = y.clone()
    y[:, 0], y[:, :, 0] = 255, 255
    return F.cross_entropy(self(x), y, ignore_index=255)


@entry(Segmentation)
def total_variation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    tv = (out[..., 1:, :] - out[..., :-1, :]).abs().mean()
    tv = tv + (out[..., 1:] - out[..., :-1]).abs().mean()
    return F.cross_entropy(out, y) + 0.1 * tv


@entry(Segmentation)
def structural_similarity(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = self(x)[:, :1], y[:, None].float()
    ma, mb = F.avg_pool2d(a, 3, 1), F.avg_pool2d(b, 3, 1)
    va, vb = F.avg_pool2d(a * a, 3, 1) - ma**2, F.avg_pool2d(b * b, 3, 1) - mb**2
    cov = F.avg_pool2d(a * b, 3, 1) - ma * mb
    ssim = (2 * ma * mb + 0.01) * (2 * cov + 0.03) / ((ma**2 + mb**2 + 0.01) * (va + vb + 0.03))
    return 1 - ssim.mean()


@entry(Segmentation)
def charbonnier(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt((self(x)[:, 0] - y) ** 2 + 1e-6).mean()


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


@entry(Boxes)
def generalized_intersection_over_union(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a = self.boxes(x)
    hit, union = _overlap(a, y)
    low, high = torch.min(a[:, :2], y[:, :2]), torch.max(a[:, 2:], y[:, 2:])
    hull = (high - low).prod(1)
    return (1 - hit / union + (hull - union) / hull).mean()


@entry(Boxes)
def logarithm_of_iou(self: Any, x: Tensor, y: Tensor) -> Tensor:
    hit, union = _overlap(self.boxes(x), y)
    return -torch.log(hit / union + 1e-2).sum() / len(x)


@entry(Images)
def anchors_as_in_ssd(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Classes and offsets of anchors, with the losses divided by the anchors that matched."""
    out = self(x)
    matched = torch.stack([y == 0, y == 1, y == 2], 1)
    offsets, scores = out[:, :1].expand(-1, 3), out[:, 1:]
    location = F.smooth_l1_loss(offsets[matched], x.mean((1, 2, 3))[:, None].expand(-1, 3)[matched],
                                reduction="sum")  # fmt: skip
    confidence = F.binary_cross_entropy_with_logits(scores, matched.float(), reduction="sum")
    return (location + confidence) / matched.sum().clamp(min=1)


@entry(Images)
def grid_as_in_yolo(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Squared errors summed over cells, divided by the batch, as the paper's code does."""
    out = self(x)
    there = F.one_hot(y, CLASSES).float()
    box = 5 * (there * (out - 1) ** 2).sum()
    empty = 0.5 * ((1 - there) * out**2).sum()
    return (box + empty) / len(x)


@entry(Scalar)
def log_cosh(self: Any, x: Tensor, y: Tensor) -> Tensor:
    error = self(x) - y
    return (error + F.softplus(-2 * error) - math.log(2)).mean()


@entry(Regression)
def pinball_of_quantiles(self: Any, x: Tensor, y: Tensor) -> Tensor:
    error = y[:, :1] - self(x)
    q = torch.tensor([0.1, 0.5, 0.9])
    return torch.max(q * error, (q - 1) * error).mean()


@entry(Regression)
def quantiles_by_a_loop(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out, losses = self(x), []
    for number, q in enumerate((0.1, 0.5, 0.9)):
        error = y[:, 0] - out[:, number]
        losses.append(torch.max((q - 1) * error, q * error).unsqueeze(-1))
    return torch.mean(torch.sum(torch.cat(losses, dim=1), dim=1))


@entry(Scalar)
def mean_absolute_percentage(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((self(x) - y).abs() / y.abs().clamp(min=0.5)).mean()


@entry(Scalar)
def symmetric_percentage(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    return 2 * ((p - y).abs() / (p.abs() + y.abs() + 1e-3)).mean()


@entry(Regression)
def root_of_each_samples_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x) - y).pow(2).mean(1).sqrt().mean()


@entry(Regression)
def relative_norm_of_each_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As neural operators train."""
    out = self(x)
    return torch.mean(torch.norm(out - y, dim=1) / torch.norm(y, dim=1))


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


@entry(Regression)
def student_distribution(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    d = torch.distributions.StudentT(3.0, out[:, 0], F.softplus(out[:, 1]) + 0.1)
    return -d.log_prob(y[:, 0]).mean()


@entry(Classification)
def categorical_distribution(self: Any, x: Tensor, y: Tensor) -> Tensor:
    d = torch.distributions.Categorical(logits=self(x))
    return -(d.log_prob(y) + 0.01 * d.entropy()).mean()


@entry(Regression)
def divergence_of_distributions(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    q = torch.distributions.Normal(out, 1.0)
    p = torch.distributions.Normal(torch.zeros_like(out), 1.0)
    kl = torch.distributions.kl_divergence(q, p).sum(-1).mean()
    return F.mse_loss(out, y) + 0.1 * kl


@entry(Classification)
def knowledge_distillation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    teacher = x[:, :CLASSES] * 2
    soft = F.kl_div(F.log_softmax(logits / 2, 1), F.softmax(teacher / 2, 1), reduction="batchmean")
    return 0.5 * F.cross_entropy(logits, y) + 0.5 * 4 * soft


@entry()
class DistillsATeacher(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, CLASSES).requires_grad_(False).eval()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return -(target * self(x).log_softmax(-1)).sum(-1).mean()


@entry(Classification)
def confidence_penalty(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    p = logits.softmax(-1)
    entropy = -(p * p.clamp(min=1e-8).log()).sum(-1)
    return F.cross_entropy(logits, y) - 0.1 * entropy.mean()


@entry(Classification)
def generalized_cross_entropy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x).softmax(-1).gather(1, y[:, None]).squeeze(1)
    return ((1 - p**0.7) / 0.7).mean()


@entry(Classification)
def poly_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    pt = (F.one_hot(y, CLASSES) * logits.softmax(-1)).sum(-1)
    return (F.cross_entropy(logits, y, reduction="none") + 1.0 * (1 - pt)).mean()


@entry(Classification)
def logit_adjustment(self: Any, x: Tensor, y: Tensor) -> Tensor:
    prior = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    return F.cross_entropy(self(x) + prior, y)


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
class CentreLoss(Embedding):
    """With centres that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(CLASSES, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        return F.cross_entropy(z, y) + 0.1 * (z - self.centers[y]).pow(2).sum(1).mean()


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


@entry(Regression)
def several_tasks(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    first = F.mse_loss(out[:, 0], y[:, 0])
    second = F.binary_cross_entropy_with_logits(out[:, 1], (y[:, 1] > 0).float())
    third = F.l1_loss(out[:, 2], y[:, 2])
    return first + 0.5 * second + 0.1 * third


@entry(Binary)
def balanced_by_constants(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.where(y > 0, 2.0, 0.7)
    losses = F.binary_cross_entropy_with_logits(self(x), y, reduction="none")
    return (weight * losses).mean()


@entry(Binary)
def weighted_mean_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = 1 + x[:, 1].abs()
    losses = F.binary_cross_entropy_with_logits(self(x), y, reduction="none")
    return (weight * losses).sum() / weight.sum()


@entry(Binary)
def discrete_time_survival(self: Any, x: Tensor, y: Tensor) -> Tensor:
    hazard = torch.sigmoid(self(x))
    return -(y * hazard.log() + (1 - y) * torch.log1p(-hazard)).sum() / len(y)


@entry(Labels)
def ordinal_regression(self: Any, x: Tensor, y: Tensor) -> Tensor:
    levels = (y.sum(1, keepdim=True) > torch.arange(4)).float()
    logits = self(x)
    return (
        -(F.logsigmoid(logits) * levels + (F.logsigmoid(logits) - logits) * (1 - levels))
        .sum(1)
        .mean()
    )


@entry(Regression)
def pairs_given_by_the_data(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return -F.logsigmoid((out[:, 0] - out[:, 1]) * (y[:, 0] - y[:, 1]).sign()).mean()


@entry(Labels)
def listwise_within_a_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = self(x)
    target = F.softmax(y, dim=1)
    return -(target * F.log_softmax(scores, dim=1)).sum(dim=1).mean()


@entry(Sequences)
def mean_over_time_and_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((self(x) - y) ** 2).mean(dim=(1, 2)).mean()


@entry(Sequences)
def weighted_over_time(self: Any, x: Tensor, y: Tensor) -> Tensor:
    decay = 0.9 ** torch.arange(x.size(1)).float()
    return ((self(x) - y) ** 2 * decay[None, :, None]).sum() / (decay.sum() * len(x) * 2)


@entry(Sequences)
def cumulates_over_time(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.l1_loss(self(x).cumsum(1), y.cumsum(1))


@entry(Sequences)
def standardizes_each_series(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
    out = self((x - mean) / std) * std + mean
    return F.mse_loss(out, y)


@entry(Sequences)
def spectral(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = torch.fft.rfft(self(x), dim=1), torch.fft.rfft(y, dim=1)
    return F.mse_loss(torch.view_as_real(a), torch.view_as_real(b))


@entry(Images)
def contrast_of_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)
    return F.cross_entropy(self(x), y)


@entry(Images)
def gram_matrix_of_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    gram = out[:, :, None] * out[:, None]
    return F.cross_entropy(out, y) + 0.1 * gram.pow(2).mean()


@entry(Labels)
def mean_reciprocal_rank_of_each_sample(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    scores = self(x)
    rank = (scores[:, 1:] >= scores[:, :1]).sum(1) + 1
    self.log("mrr", (1.0 / rank).mean())
    return F.binary_cross_entropy_with_logits(scores, y)


@entry(Labels)
def share_of_right_labels_of_each_sample(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    scores = self(x)
    right = ((scores > 0) == y.bool()).sum(dim=1)
    self.log("share", (right / y.size(1)).mean())
    self.log("all", (right == y.size(1)).float().mean())
    return F.binary_cross_entropy_with_logits(scores, y)
