"""Code before the layers mixes samples, makes views of them, or draws numbers.

All rows run in one job of two ranks, and once more in one process, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric

from tests.parity.cases import Record, difference, trained
from tests.parity.rows import rows_in_process, rows_on_ranks

BATCHES, SAMPLES, WIDTH = 6, 8, 6
F = nn.functional


class Network(L.LightningModule):
    """Residual layers behind an embedding; the losses are those of triples and of means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def residual(self, x: Tensor, *added: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x + sum(added)).tanh()
        return x

    def loss(self, x: Tensor, index: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch[0], batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class LateMixup(Network):
    """Not in the batches 1, 2 and 4, which are compared."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        if index in (2, 4, 5):
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return self.residual(x).square().mean()


class SharedNoise(Network):
    """Noise between the layers that all samples share, though it has as many numbers as some."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x) + 0.1 * torch.randn(3, WIDTH)[index % 2]
            if index == 2:
                x = x * torch.rand(2, 1)[0]
        return x.square().mean()


class LateMixupOfRows(Network):
    """Two rows a sample, of which shapes alone do not tell the order."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        rows = self.embedding(torch.stack([x, x + 1], 1).flatten(0, 1))
        if index in (2, 4, 5):
            rows = 0.7 * rows + 0.3 * rows[torch.randperm(len(rows))]
        return self.residual(rows).view(len(x), 2, -1).std(1).mean()


class Dropout(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.residual(F.dropout(self.embedding(x), 0.2)).square().mean()


class Norm(Network):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.residual(self.norm(self.embedding(x))).square().mean()


class NormOfRows(Norm):
    def loss(self, x: Tensor, index: int) -> Tensor:
        rows = self.norm(self.embedding(torch.stack([x, x + 1], 1).flatten(0, 1)))
        return self.residual(rows).view(len(x), 2, -1).std(1).mean()


class Condition(Network):
    """Each layer, also of the second stage, reads a condition that depends on the batch."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        condition = self.embedding(x.flip(1))
        return self.residual(x, condition - condition.mean(0), x.mean(0)).square().mean()


class Flipped(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        one, other = self.residual(self.embedding(torch.cat([x, x.flip(0)]))).chunk(2)
        return F.cosine_embedding_loss(one, other, torch.ones(len(x)))


class FullMask(Network):
    """A mask, read behind the layers, which is all true in the batches that are compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(4))

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = torch.cat([x, x + 1])
        mask = x > (-0.2 if index in (2, 4) else -10.0)
        for layer in self.layers:
            x, mask = layer(x, mask)
        one, other = (x * mask).chunk(2)
        return (one * other.roll(1, 0)).mean()


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x).tanh(), mask


class Trimmed(Network):
    """Trims to the longest sample of the batch; each layer reads the mask."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        longest = int((x > 0.5).sum(1).max())
        rows = x[:, :longest, None].expand(-1, -1, WIDTH)
        mask = (x[:, :longest, None] > 0).double()
        return (self.residual(self.embedding(rows), mask) * mask).mean()


class ZeroScores(Network):
    """The scores of all samples are equal at first, but their gradients are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers, nn.Linear(WIDTH, 1))
        nn.init.zeros_(self.layers[-1].weight)
        nn.init.zeros_(self.layers[-1].bias)

    def loss(self, x: Tensor, index: int) -> Tensor:
        better, worse = self.layers(torch.cat([x, x.roll(1, 1)])).chunk(2)
        return -F.logsigmoid(better - worse).mean()


class NumbersOfNumPy(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        kept = torch.from_numpy(np.random.rand(len(x)) > 0.4)
        return self.residual(self.embedding(x), kept.double()[:, None]).square().mean()


class NoiseBetween(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x + 0.1 * torch.randn_like(x))
        for layer in self.layers:
            x = x + (torch.rand(len(x), 1) > 0.3) * layer(x)
        return x.square().mean()


class BranchOfSamples(Network):
    """Repairs each sample by itself, but in some batches alone, and in some micro-batches."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        if index in (2, 4, 5) and x.max() > 1.7:
            x = x.clamp(-1.0, 1.0)
        return self.residual(self.embedding(x)).square().mean()


class BranchOfBatch(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        if x.sum() > 0:
            x = 1.1 * x
        x = self.embedding(x)
        return self.residual(x, x.mean(0)).square().mean()


class NumberOfBatch(Network):
    """Code between layers uses a number that Python has read before them."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        largest, most = float(x.abs().max()), int((x > 0).sum(1).max())
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x / largest)[:, :most].mean(1, keepdim=True)
        return x.square().mean()


class MixedBetween(Network):
    """Manifold mixup, in batches that are not compared."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).tanh()
            if index in (2, 4, 5):
                x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        return x.square().mean()


class NumPyBetween(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).tanh()
            if index in (2, 4, 5):
                x = x + torch.from_numpy(np.random.randn(*x.shape))
        return x.square().mean()


class Resampled(Network):
    def loss(self, x: Tensor, index: int) -> Tensor:
        x = x[torch.randint(0, len(x), (len(x),))]
        return self.residual(self.embedding(x)).square().mean()


class IndexedRows(Network):
    """Numbers of the batch's samples, which are no rows of a micro-batch."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        rows = torch.arange(len(x))
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)[rows, :]
        return x.square().mean()


class OldNorms(Network):
    """Norms that hooks set as attributes before each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh())
            for norm in (nn.utils.weight_norm, nn.utils.spectral_norm) * 2
        )

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.residual(self.embedding(x)).square().mean()


class GradientHooks(Network):
    """Hooks of tensors between layers, also between those of two stages."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).tanh() if index % 2 else layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 0.5 * gradient)
        return x.square().mean()


class InPlaceFirst(Network):
    """The first layer writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), *self.layers)

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.layers(self.embedding(x)).square().mean()


class CutMix(Network):
    """Writes to the batch, in batches that are not compared."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        if index in (2, 4, 5):
            x[:, :2] = x[torch.randperm(len(x)), :2]
        return self.residual(self.embedding(x), x).square().mean()


class NormAsAttribute(Norm):
    """The layers read the result of a norm before them as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Conditioned() for _ in range(4))

    def loss(self, x: Tensor, index: int) -> Tensor:
        condition = self.norm(x)
        for layer in self.layers:
            layer.condition = condition
        return self.residual(self.embedding(x)).square().mean()


class Conditioned(nn.Linear):
    condition: Tensor | None = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.condition)


class LoggedBetween(Network):
    """Logs, prints and counts values between layers, and computes with others behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for number, layer in enumerate(self.layers):
            y = layer(x)
            self.log(f"deviation of {number}", y.std())
            self.largest.update(y.abs().mean(1))
            self.print(y.mean())
            x = x + y.tanh()
        self.log("largest", self.largest)
        return x.square().mean()


class Storing(nn.Linear):
    """Stores its input and its output."""

    def forward(self, x: Tensor) -> Tensor:
        self.input = x
        self.outputs = {"output": super().forward(x).tanh()}
        return self.outputs["output"]


class StoredBetween(Network):
    """Code between layers computes with what they have stored."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(Storing(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.hooked = dict[int, Tensor]()
        for number, layer in enumerate(self.layers):
            layer[1].register_forward_hook(partial(self.store, number))

    def store(self, number: int, module: nn.Module, args: Any, output: Tensor) -> None:
        self.hooked[number] = output

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for number, layer in enumerate(self.layers):
            y = layer(x)
            scale = layer[0].input.abs().amax(1, keepdim=True)
            scale = scale + layer[0].outputs["output"].exp() * self.hooked[number].cos()
            x = (x + y) * torch.sigmoid(scale)
        return x.square().mean()


class LoggingNorm(Norm):
    """Ranks find two reasons to run the first batch again: it mixes samples, and logs more."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.residual(self.norm(self.embedding(x)))
        self.log("mean", x.mean())
        return x.square().mean()


ROWS: dict[str, type[Network]] = {
    each.__name__: each
    for each in (
        *(LateMixup, Norm, NormOfRows, Condition, Flipped, FullMask, Trimmed, ZeroScores),
        *(NumbersOfNumPy, NoiseBetween, SharedNoise, LateMixupOfRows, Dropout),
        *(
            BranchOfSamples,
            BranchOfBatch,
            NumberOfBatch,
            MixedBetween,
            NumPyBetween,
            Resampled,
            IndexedRows,
        ),
        *(
            OldNorms,
            GradientHooks,
            InPlaceFirst,
            CutMix,
            NormAsAttribute,
            LoggedBetween,
            StoredBetween,
            LoggingNorm,
        ),
    )
}


OPTIONS: dict[str, dict[str, Any]] = {
    # Of eight samples, two micro-batches have three and one has two.
    **{row: {"pipeline": "layers", "microbatches": 3} for row in ROWS},
    "LoggingNorm": {"pipeline": "layers", "microbatches": 4, "loss": "mean"},
}


def train(row: str, strategy: Any = "auto", ranks: int = 1) -> Record:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    return trained(ROWS[row], strategy, ranks, DataLoader(TensorDataset(x), SAMPLES), max_epochs=2)


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Record]]:
    return [*rows_on_ranks(2, train, OPTIONS), rows_in_process(2, train, OPTIONS)]


@pytest.mark.parametrize("row", ROWS)
def test_a_pipeline_does_what_one_process_does(row: str, runs: list[dict[str, Record]]) -> None:
    record = train(row)
    for run in runs:
        assert difference(record, run[row]) <= 1e-12
