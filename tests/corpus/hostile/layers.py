"""Layers of the user's own that use statistics of the batch, on any stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import OUTPUTS, Regression


class CentreInTraining(nn.Module):
    """Has no state at all, and does nothing in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if self.training else x


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
class CentresInTrainingOnTheFirstStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(1, CentreInTraining())


@entry()
class CodebookOfTheBatch(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model.insert(2, VectorQuantizer(12))


@entry()
class StandardizesBetweenLayers(Regression):
    """In the module's forward, on the way from one layer to the next."""

    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 1:
                x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        return x


@entry()
class BatchNormByParameters(Regression):
    """Batch norm of one's own, with parameters and running statistics on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(OUTPUTS))
        self.register_buffer("running_mean", torch.zeros(OUTPUTS))

    def forward(self, x: Tensor) -> Any:
        out = self.model(x)
        mean = out.mean(0) if self.training else self.running_mean
        if self.training:
            self.running_mean.mul_(0.9).add_(0.1 * mean.detach())
        return self.gain * (out - mean)
