"""What a step changes on the module and its layers."""

from __future__ import annotations

import copy
from collections import Counter, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, OUTPUTS, Classification, Embedding, Regression, mlp


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


@entry(equal=True)
class CountsInALayer(Regression):
    """A noise that decays, in the first layer."""

    class Decaying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * (1 + 0.5**self.calls)

    def __init__(self) -> None:
        super().__init__()
        self.model[1] = self.Decaying()


@entry()
class AveragesInALayer(Regression):
    """A layer that divides by a moving average of what goes through it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
            return x / self.scale

    def __init__(self) -> None:
        super().__init__()
        self.model[3] = self.Scaled()


@entry(equal=True)
class SpectralNormOfOld(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model[0] = torch.nn.utils.spectral_norm(self.model[0])


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
class SumsInADict(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.sums = {"loss": 0.0, "samples": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.sums["loss"] += loss.item() * len(batch[0])
        self.sums["samples"] += len(batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", self.sums["loss"] / max(self.sums["samples"], 1))


@entry(equal=True)
class CountsWithACounter(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[int] = Counter()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self(x)
        self.seen.update(logits.argmax(-1).tolist())
        return F.cross_entropy(logits, y)


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


@entry()
class QueueInABuffer(Embedding):
    """MoCo's queue with its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(16, 5), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        loss = F.cross_entropy(z, y) + (z @ self.queue.clone().T).logsumexp(1).mean()
        start = int(self.pointer)
        with torch.no_grad():
            self.queue[start : start + len(z)] = F.normalize(z.detach(), dim=1)
            self.pointer[0] = (start + len(z)) % 16
        return loss


@entry(equal=True)
class SumsInNumpy(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.totals = np.zeros(OUTPUTS)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        self.totals += (out - y).abs().sum(0).detach().numpy()
        return F.mse_loss(out, y)


@entry()
class ClassCentresInABuffer(Embedding):
    """The centre loss: centres that move towards the samples of their class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(5, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        loss = F.cross_entropy(z, y) + 0.1 * (z - self.centers[y]).pow(2).sum(-1).mean()
        with torch.no_grad():
            for label in y.unique():
                self.centers[label] += 0.5 * (z[y == label].mean(0) - self.centers[label])
        return loss


@entry()
class RunningStatisticsOfTargets(Regression):
    """A normalizer of the targets that learns their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(OUTPUTS))
        self.register_buffer("count", torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += len(y)
        self.mean += (y - self.mean).sum(0) / self.count
        return F.mse_loss(self(x), y - self.mean)


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
