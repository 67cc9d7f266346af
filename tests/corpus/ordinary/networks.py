"""Layers and networks of every kind, each with a plain loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.corpus.harness import entry
from tests.corpus.modules import (
    CLASSES,
    FEATURES,
    LENGTH,
    OUTPUTS,
    WORDS,
    Classification,
    Images,
    Regression,
    Segmentation,
    Sequences,
    Tagger,
)


def network(base: type, name: str, *layers: Callable[[], nn.Module], **options: Any) -> None:
    """Enter a module with other layers than its base."""

    def __init__(self: Any) -> None:
        base.__init__(self)
        self.model = nn.Sequential(*(make() for make in layers))

    entry(**options)(type(name, (base,), {"__init__": __init__, "__module__": __name__}))


def linear(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs)


def between(*layers: Callable[[], nn.Module]) -> tuple[Callable[[], nn.Module], ...]:
    return (linear(FEATURES, 12), *layers, linear(12, 12), nn.ReLU, *layers, linear(12, OUTPUTS))


network(Regression, "LayerNorms", *between(lambda: nn.LayerNorm(12), nn.GELU))
network(Regression, "RootMeanSquareNorms", *between(lambda: nn.RMSNorm(12), nn.SiLU))
network(Regression, "GroupNorms", *between(lambda: nn.GroupNorm(3, 12), nn.Mish))
network(Regression, "Bilinears", *between(lambda: nn.Sequential(nn.Linear(12, 24), nn.GLU())))
network(Regression, "LearnedActivations", *between(lambda: nn.PReLU(12)))
network(Regression, "Softplus", *between(nn.Softplus))
network(
    Regression,
    "WeightNorm",
    *between(lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))),
)
network(
    Regression,
    "Orthogonal",
    *between(lambda: torch.nn.utils.parametrizations.orthogonal(nn.Linear(12, 12))),
)
network(Regression, "Dropout", *between(lambda: nn.Dropout(0.3)), random=True)
network(Regression, "AlphaDropout", *between(nn.SELU, lambda: nn.AlphaDropout(0.2)), random=True)
network(Regression, "RandomizedActivations", *between(nn.RReLU), random=True)
network(
    Sequences,
    "Convolutions",
    lambda: Transposed(nn.Conv1d(2, 8, 3, padding=2, dilation=2)),
    nn.ReLU,
    lambda: Transposed(nn.Conv1d(8, 8, 3, padding=1)),
    linear(8, 2),
)
network(
    Sequences,
    "RecurrentLayers",
    lambda: First(nn.LSTM(2, 8, batch_first=True)),
    lambda: First(nn.GRU(8, 8, batch_first=True)),
    linear(8, 2),
)
network(
    Sequences,
    "TransformerEncoder",
    linear(2, 8),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
    linear(8, 2),
)
network(
    Sequences,
    "TransformerEncoderWithDropout",
    linear(2, 8),
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    linear(8, 2),
    random=True,
)
network(
    Segmentation,
    "DownAndUp",
    lambda: nn.Conv2d(2, 8, 3, 2, 1),
    nn.ReLU,
    lambda: nn.InstanceNorm2d(8, affine=True),
    lambda: nn.ConvTranspose2d(8, 8, 2, 2),
    lambda: nn.Conv2d(8, 3, 1),
)
network(
    Segmentation,
    "PixelShuffle",
    lambda: nn.Conv2d(2, 12, 3, 2, 1),
    nn.ReLU,
    lambda: nn.Conv2d(12, 12, 1),
    lambda: nn.PixelShuffle(2),
)
network(
    Images,
    "Pooling",
    lambda: nn.Conv2d(2, 8, 3, padding=1, groups=2),
    nn.Hardswish,
    lambda: nn.MaxPool2d(2),
    lambda: nn.LocalResponseNorm(2),
    lambda: nn.AdaptiveAvgPool2d(1),
    nn.Flatten,
    linear(8, CLASSES),
)
network(
    Images,
    "SqueezeAndExcitation",
    lambda: nn.Conv2d(2, 8, 3, padding=1),
    lambda: Squeeze(8),
    lambda: nn.AdaptiveMaxPool2d(1),
    nn.Flatten,
    linear(8, CLASSES),
)
network(
    Images,
    "BatchNorms",
    lambda: nn.Conv2d(2, 8, 3, padding=1),
    lambda: nn.BatchNorm2d(8),
    nn.ReLU,
    nn.Flatten,
    linear(288, CLASSES),
    reason="Statistics are those of a micro-batch.",
)


class Transposed(nn.Module):
    """A layer that has its channels before the time."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class First(nn.Module):
    """What a recurrent layer says, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Squeeze(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(channels, 2), nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.up(self.down(x.mean((2, 3))).relu()).sigmoid()
        return x * scale[..., None, None]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 16),
            nn.Linear(16, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@entry()
class ResidualBlocks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(Residual(12) for _ in range(4))
        self.inwards, self.outwards = nn.Linear(FEATURES, 12), nn.Linear(12, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = self.inwards(x)
        for layer in self.model:
            x = layer(x)
        return self.outwards(x)


@entry()
class ResidualSumsInTheLoop(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        for layer in self.model:
            x = x + torch.tanh(layer(x))
        return self.head(x)


@entry()
class DenseConnections(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(nn.Linear(FEATURES * (n + 1), FEATURES) for n in range(3))
        self.head = nn.Linear(4 * FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        outputs = [x]
        for layer in self.model:
            outputs.append(layer(torch.cat(outputs, 1)).relu())
        return self.head(torch.cat(outputs, 1))


@entry()
class UNet(Segmentation):
    pipeline = ("downs", "ups")

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.downs = nn.ModuleList([nn.Conv2d(2, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 2, 1)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 3, 1, 1)])

    def forward(self, x: Tensor) -> Any:
        first = self.downs[0](x).relu()
        x = self.ups[0](self.downs[1](first).relu())
        return self.ups[1](torch.cat([x, first], 1))


@entry()
class TiedEmbeddings(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8, padding_idx=0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(self.model(self.embed(x)))


@entry()
class TransformerWithMasks(Tagger):
    """Padding and causal masks, positions and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.positions = nn.Parameter(0.02 * torch.randn(1, LENGTH, 8))
        self.model = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["words"]) + self.positions
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        padding = torch.zeros_like(batch["mask"], dtype=torch.float)
        padding = padding.masked_fill(~batch["mask"], float("-inf"))
        for layer in self.model:
            x = layer(x, src_mask=causal, src_key_padding_mask=padding)
        return F.cross_entropy(self.head(self.norm(x)).mT, batch["labels"])


@entry()
class ClassToken(Sequences):
    """A vision transformer's token, here of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 8), nn.Linear(8, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.model = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.embed(x)
        z = torch.cat([self.token.expand(len(z), -1, -1), z], dim=1)
        return F.mse_loss(self.head(self.model(z)[:, 0]), y.mean(1))


@entry()
class PackedSequences(Tagger):
    """An LSTM over packed sequences, one layer of the container."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            out, _ = self.lstm(packed)
            return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=LENGTH)[0]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.model = nn.ModuleList([self.Packed(), self.Packed()])

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["words"])
        for layer in self.model:
            x = layer(x, batch["lengths"])
        return F.cross_entropy(self.head(x).mT, batch["labels"])


@entry()
class Checkpointed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(Residual(FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_(torch.is_grad_enabled())
        for layer in self.model:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@entry()
class FrozenBackbone(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05)


@entry()
class LowRankAdapters(Regression):
    class Adapter(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down = nn.Parameter(0.1 * torch.randn(2, layer.in_features))
            self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x @ self.down.T @ self.up.T

    def __init__(self) -> None:
        super().__init__()
        for number in (0, 2, 4):
            self.model[number] = self.Adapter(self.model[number])


@entry()
class MixtureOfExperts(Regression):
    """A soft mixture, without a loss of its own."""

    class Experts(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gate = nn.Linear(width, 3)
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            shares = self.gate(x).softmax(-1)
            outs = torch.stack([expert(x) for expert in self.experts], 1)
            return (shares[..., None] * outs).sum(1)

    def __init__(self) -> None:
        super().__init__()
        self.model[1], self.model[3] = self.Experts(12), self.Experts(12)


@entry()
class OutputHeads(Regression):
    """Two heads after the layers, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"mean": nn.Linear(3, 3), "scale": nn.Linear(3, 3)})

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        mean, scale = self.heads["mean"](z), F.softplus(self.heads["scale"](z)) + 0.1
        return (((y - mean) / scale).pow(2) / 2 + scale.log()).mean()


@entry()
class TwoInputs(Regression):
    """A condition that joins after the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Linear(FEATURES, 12)

    def forward(self, x: Tensor) -> Any:
        condition = self.condition(x.flip(1))
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 2:
                x = x + condition
        return x


@entry()
class DeepSupervision(Regression):
    """Losses of several layers' outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList([nn.Linear(FEATURES, 3), nn.Linear(3, 3), nn.Linear(3, 3)])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = []
        for layer in self.model:
            x = layer(x.tanh())
            losses.append(F.mse_loss(x, y))
        return torch.stack(losses).mean()


@entry(random=True)
class StochasticDepth(Regression):
    """Drops whole samples of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))
        self.head = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        for layer in self.model:
            branch = layer(x).relu()
            if self.training:
                branch = branch * (torch.rand(len(x), 1) > 0.2) / 0.8
            x = x + branch
        return self.head(x)


@entry()
class SinusoidalFeatures(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(2))
        self.model = nn.Sequential(nn.Linear(4 * FEATURES, 12), nn.ReLU(), nn.Linear(12, OUTPUTS))

    def forward(self, x: Tensor) -> Any:
        angles = (x[..., None] * self.frequencies).flatten(1)
        return self.model(torch.cat([angles.sin(), angles.cos()], -1))
