"""What a step changes on the module and its layers."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, OUTPUTS, Embedding, Regression, mlp


@entry(equal=True)
class AnnealsBetaLikePyTorchVAE(Regression):
    """A counter of the class, as a plain number."""

    num_iter = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.num_iter += 1
        out = self(x)
        kld = out.pow(2).mean()
        capacity = torch.clamp(torch.tensor(25.0) / 1e2 * self.num_iter, 0, 25.0)
        loss = F.mse_loss(out, y) + 0.5 * (kld - capacity).abs()
        self.log("kld", kld)
        return loss


@entry(strategy={"pipeline": "model"}, equal=True)
class TeacherInTheStep(Regression):
    """A mean teacher that the step moves along before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(FEATURES, OUTPUTS)
        self.teacher.requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                old.mul_(0.9).add_(0.1 * new)
            target = self.teacher(x)
        out = self(x)
        return F.mse_loss(out, y) + F.mse_loss(out, target)


@entry(strategy={"pipeline": "model"}, equal=True)
class TeacherOfOneLayer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(OUTPUTS, OUTPUTS)
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        for old, new in zip(self.slow.parameters(), self.head.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data
        out = self(x)
        return F.mse_loss(self.head(out), y) + F.mse_loss(self.head(out), self.slow(out))


@entry()
class KeepsTheBest(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.best = 1e9

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.best = min(self.best, loss.item())
        self.log("best", self.best)
        return loss


@entry(equal=True)
class KeepsOutputsInADeque(Embedding):
    """A memory of earlier outputs as negatives, as MoCo has."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: deque[Tensor] = deque(maxlen=2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        loss = F.cross_entropy(z, y)
        if self.memory:
            loss = loss + 0.1 * torch.cdist(z, torch.cat(list(self.memory))).mean()
        self.memory.append(z.detach())
        return loss


@entry(equal=True)
class SetsAWeightFromAnother(Regression):
    """The step normalizes a weight in place, as ArcFace heads and weight clipping do."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.model[4].weight.clamp_(-0.2, 0.2)
        return F.mse_loss(self(x), y)


@entry(equal=True)
class RegistersHooksInItsFirstStep(Regression):
    """As transformers does for the logits of routers: a number says that the hooks are there."""

    def __init__(self) -> None:
        super().__init__()
        self.are_registered = False
        self.kept: list[Tensor] = []

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.are_registered:
            for layer in (self.model[1], self.model[3]):
                layer.register_forward_hook(lambda _, args, output: self.kept.append(output))
            self.are_registered = True
        self.kept.clear()
        loss = F.mse_loss(self(x), y) + 0.1 * torch.stack(self.kept).pow(2).mean(-1).sum(0).mean()
        self.kept.clear()
        return loss


class VectorQuantizer(nn.Module):
    """A codebook that follows the means of what the batch assigns to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, width))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            hot = F.one_hot(chosen, 4).float()
            means = hot.T @ x.detach() / hot.sum(0).clamp(min=1)[:, None]
            self.codes.lerp_(means, 0.2)
        return x + (self.codes[chosen] - x).detach()


@entry()
class CodebookOfTheBatch(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, VectorQuantizer(12))


@entry(equal=True)
class SpectralNormOfOld(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model[0] = torch.nn.utils.spectral_norm(self.model[0])


@entry(equal=True)
class SumsInNumpy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.totals = np.zeros(OUTPUTS)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        self.totals += (out - y).abs().sum(0).detach().numpy()
        return F.mse_loss(out, y)
