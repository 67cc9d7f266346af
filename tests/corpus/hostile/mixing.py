"""Samples mixed with each other: rolls, flips, halves, mixup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Images, Regression, Scalar


@entry(Images)
def mixup_by_flip(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As timm does: the batch with itself, reversed."""
    target = F.one_hot(y, 4).float()
    x, target = 0.7 * x + 0.3 * x.flip(0), 0.7 * target + 0.3 * target.flip(0)
    return -(target * F.log_softmax(self(x), -1)).sum(-1).mean()


@entry(Images)
def mixup_by_roll(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As torchvision does."""
    mixed = 0.6 * x + 0.4 * x.roll(1, 0)
    logits = self(mixed)
    return 0.6 * F.cross_entropy(logits, y) + 0.4 * F.cross_entropy(logits, y.roll(1, 0))


@entry(Images)
def cutmix_by_roll(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x[:, :, :3, :3] = x.roll(1, 0)[:, :, :3, :3]
    logits = self(x)
    return 0.75 * F.cross_entropy(logits, y) + 0.25 * F.cross_entropy(logits, y.roll(1, 0))


@entry(Classification)
def manifold_mixup_of_outputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    logits = 0.5 * (logits + logits.flip(0))
    return F.cross_entropy(logits, y)


@entry(Embedding)
def negatives_by_roll(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.triplet_margin_loss(z, z * 1.1, z.roll(1, 0))


@entry(Embedding)
def negatives_by_index(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    others = (torch.arange(len(z)) + 1) % len(z)
    return F.triplet_margin_loss(z, z + 0.1, z[others])


@entry(Embedding)
def negatives_by_cat(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    shifted = torch.cat([z[1:], z[:1]])
    return F.cosine_embedding_loss(z, shifted, torch.where(y == y.roll(-1), 1, -1))


@entry(Embedding)
def negatives_by_gather(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    index = torch.arange(len(z)).flip(0)[:, None].expand_as(z)
    return (z - z.gather(0, index)).pow(2).mean() + F.cross_entropy(z, y)


@entry(Embedding)
def negatives_by_index_select(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return (z * z.index_select(0, torch.arange(len(z) - 1, -1, -1))).sum(-1).mean()


@entry(Embedding)
def negatives_by_take_along_dim(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    order = y.argsort(stable=True)[:, None].expand_as(z)
    return F.mse_loss(z, torch.take_along_dim(z, order, 0).detach())


@entry(Embedding)
def rotates_by_flip_of_rows(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z, torch.flipud(z).detach())


@entry(Regression)
def first_four_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z[:4], y[:4])


@entry(Regression)
def last_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x)[-1], y[-1])


@entry(Regression)
def every_other_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Right by luck in micro-batches of two, wrong in others."""
    z = self(x)
    return F.mse_loss(z[::3], y[::3])


@entry(Regression)
def first_half_against_second(self: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = self(x).chunk(2)
    return F.mse_loss(a, b) + F.mse_loss(a, y[: len(a)])


@entry(Regression)
def half_by_shape(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z, half = self(x), x.shape[0] // 2
    return F.mse_loss(z[:half], y[:half]) + 0.1 * z[half:].abs().mean()


@entry(Classification)
def consistency_of_two_halves(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A semi-supervised step: the first half of the batch has labels."""
    labelled, others = torch.split(self(x), len(x) // 2)
    pseudo = others.detach().softmax(-1)
    return (
        F.cross_entropy(labelled, y[: len(labelled)])
        - 0.1 * (pseudo * others.log_softmax(-1)).sum(-1).mean()
    )


@entry(Regression)
def differences_of_neighbours(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z, y) + 0.1 * torch.diff(z, dim=0).abs().mean()


@entry(Regression)
def differences_by_slices(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z, y) + 0.1 * (z[1:] - z[:-1]).pow(2).sum() / len(z)


@entry(Scalar)
def temporal_difference(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """A trajectory as a batch, as reinforcement learning has it."""
    v = self(x)
    target = y + 0.9 * torch.cat([v[1:], v.new_zeros(1)]).detach()
    return F.mse_loss(v, target)


@entry(Regression)
def adds_the_first_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z + 0.5 * z[0], y)


@entry(Regression)
def mixes_inputs_with_the_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(0.9 * x + 0.1 * x.mean(0, keepdim=True)), y)


@entry(Regression)
def convolves_over_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    smooth = F.avg_pool1d(z.T[None], 3, 1, 1)[0].T
    return F.mse_loss(smooth, y)


@entry(Regression)
def unfolds_windows_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.mse_loss(z.unfold(0, 2, 1).mean(-1), y[:-1])


@entry(Regression)
def pads_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.pad(self(x), (0, 0, 1, 0))[:-1]
    return F.mse_loss(z, y)
