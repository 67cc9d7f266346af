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
ACTIVATION = nn.ReLU()
network(
    Regression,
    "OneActivationInSeveralPlaces",
    *between(lambda: ACTIVATION),
    strategy={"recompute": "sqrt"},
)
network(Regression, "GroupNorms", *between(lambda: nn.GroupNorm(3, 12), nn.Mish))
network(
    Regression,
    "WeightNorm",
    *between(lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))),
)
network(Regression, "Dropout", *between(lambda: nn.Dropout(0.3)), random=True)
network(
    Sequences,
    "RecurrentLayers",
    lambda: First(nn.LSTM(2, 8, batch_first=True)),
    lambda: First(nn.GRU(8, 8, batch_first=True)),
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


class First(nn.Module):
    """What a recurrent layer says, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


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
