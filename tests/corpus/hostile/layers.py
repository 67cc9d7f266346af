"""Layers of the user's own that use statistics of the batch, on any stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import CLASSES, FEATURES, OUTPUTS, Classification, Regression


class Standardize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class StandardizeInTraining(nn.Module):
    """Statistics of the batch in training, its own buffers in evaluation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            mean, var = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        else:
            mean, var = self.mean, self.var
        return (x - mean) / (var + 1e-3).sqrt()


class CentreInTraining(nn.Module):
    """Has no state at all, and does nothing in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True) if self.training else x


class StandardDeviationFeature(nn.Module):
    """The mini-batch standard deviation of StyleGAN's discriminator."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)


class PairNorm(nn.Module):
    """Of graph networks."""

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(0)
        return x / (1e-5 + x.pow(2).sum(-1).mean()).sqrt()


class AttentionOverSamples(nn.Module):
    """Attention without batch_first: takes the samples for the positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class RecurrentOverSamples(nn.Module):
    """An LSTM that gets a matrix takes the samples for time steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRU(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class MaximumScaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax()


class BatchTemperature(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().std().item()


class SoftmaxOverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * nn.Softmax(dim=0)(x) * len(x)


class GhostNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class CrossSampleMixer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.8 * x + 0.2 * x.roll(1, 0)


class LoadBalance(nn.Module):
    """A gate whose capacity depends on how many samples there are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(-1)
        chosen = score.argmax(-1)
        out = x.clone()
        capacity = -(-len(x) // 3)
        for number, expert in enumerate(self.experts):
            index = (chosen == number).nonzero().flatten()[:capacity]
            out = out.index_add(0, index, expert(x[index]) * score[index, number, None])
        return out


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


class Whitening(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(0)
        cov = centred.T @ centred / len(x) + 0.1 * torch.eye(x.shape[1])
        return torch.linalg.solve_triangular(torch.linalg.cholesky(cov), centred.T, upper=False).T


class FirstSampleAsReference(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x[:1]


def _network(layer: nn.Module, at: int, outputs: int, width: int = 12) -> nn.Sequential:
    layers: list[nn.Module] = [
        nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        nn.Linear(width, outputs),
    ]  # fmt: skip
    layers.insert(at, layer)
    return nn.Sequential(*layers)


@entry()
class StandardizesOnTheFirstStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(Standardize(), 1, OUTPUTS)


@entry()
class StandardizesOnTheLastStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(Standardize(), 4, OUTPUTS)


@entry()
class StandardizesInTrainingOnly(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(StandardizeInTraining(12), 2, OUTPUTS)


@entry()
class CentresInTrainingOnTheFirstStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(CentreInTraining(), 1, OUTPUTS)


@entry()
class CentresInTrainingOnTheLastStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(CentreInTraining(), 4, OUTPUTS)


@entry()
class MinibatchStandardDeviation(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(StandardDeviationFeature(), 4, CLASSES)
        self.model[5] = nn.Linear(13, CLASSES)


@entry()
class NormalizesPairs(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(PairNorm(), 1, CLASSES)


@entry()
class AttendsToSamples(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(AttentionOverSamples(12), 2, OUTPUTS)


@entry()
class RecursOverSamples(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(RecurrentOverSamples(12), 4, OUTPUTS)


@entry()
class ScalesByTheMaximum(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(MaximumScaled(), 3, OUTPUTS)


@entry()
class TemperatureOfTheBatch(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(BatchTemperature(), 1, CLASSES)


@entry()
class SoftmaxOverSamples(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(SoftmaxOverBatch(), 2, CLASSES)


@entry()
class GhostBatchNorm(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(GhostNorm(), 1, CLASSES)


@entry()
class MixesSamplesInALayer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(CrossSampleMixer(), 3, OUTPUTS)


@entry()
class ExpertsWithACapacity(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(LoadBalance(12), 2, OUTPUTS)


@entry()
class CodebookOfTheBatch(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(VectorQuantizer(12), 2, OUTPUTS)


@entry()
class WhitensOutputs(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(Whitening(), 4, OUTPUTS)


@entry()
class SubtractsTheFirstSample(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = _network(FirstSampleAsReference(), 1, OUTPUTS)


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
class CentresBetweenStagesInTraining(Regression):
    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 2 and self.training:
                x = x - x.mean(0)
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
