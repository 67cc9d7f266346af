"""Batches that cannot be divided into micro-batches pass through the stages whole.

All rows run in one job of two ranks, in float64. Each warns, and equals one process.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.parity.cases import Record, difference, trained
from tests.parity.rows import rows_on_ranks
from tests.parity.test_front import SAMPLES, WIDTH, Network

BATCHES = 5


class Validated(Network):
    declared: Any = "whole"

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch[0], batch_idx))


class Centered(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0)).tanh()


class WithCentered(Validated):
    """A layer of the second stage compares samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Centered(WIDTH, WIDTH)

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.residual(self.embedding(x)).square().mean()


class Masked(Centered):
    """Masks some of its outputs, which are far larger than the others."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(WIDTH) % 2 == 0
        return super().forward(x).masked_fill(chosen, torch.finfo(torch.float32).min)


class WithMasked(Validated):
    """The last layer compares samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers[:-1], Masked(WIDTH, WIDTH))

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.layers(self.embedding(x)).logsumexp(1).square().mean()


class Biased(Centered):
    """Adds a mask."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 1e4 * (torch.arange(WIDTH) % 2 == 0)


class WithBiased(WithMasked):
    def __init__(self) -> None:
        super().__init__()
        self.layers[-1] = Biased(WIDTH, WIDTH)


class Branches(Validated):
    """The code between layers does something else for large values."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
            if x.max() > 1.5:
                x = x / 2
        return x.square().mean()


class BranchesOfMean(Branches):
    """The loss is declared to be a mean, which does not hold."""

    declared = "mean"


class Scaled(Validated):
    """The code between layers computes with a number of the batch, from its second epoch on."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
            if self.trainer.current_epoch > 0:
                x = x / x.abs().max().item()
        return x.square().mean()


class OverSamples(Validated):
    """Attention over the samples of the batch, as of a transformer with its dimensions swapped."""

    def __init__(self) -> None:
        super().__init__()
        shape = {"dim_feedforward": WIDTH, "dropout": 0.0, "dtype": torch.float64}
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, **shape) for _ in range(4))
        )

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.layers(self.embedding(x)).square().mean()


class Recurrent(nn.Module):
    """Begins with a state of the hyperparameters' number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(SAMPLES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x, self.state)


class OfGivenSize(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Recurrent() for _ in range(4))

    def loss(self, x: Tensor, index: int) -> Tensor:
        return self.residual(self.embedding(x)).square().mean()


class SomeOfGivenSize(Validated):
    """Some batches are divided."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = x.view(SAMPLES, WIDTH) if index in (2, 4) else x
        return self.residual(self.embedding(x)).square().mean()


class Packed(nn.LSTM):
    def forward(self, x: PackedSequence) -> PackedSequence:  # type: ignore[override]
        return super().forward(x)[0]


class PackedSequences(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Packed(WIDTH, WIDTH, batch_first=True) for _ in range(4)))

    def through(self, packed: PackedSequence, index: int) -> tuple[PackedSequence, Any]:
        return self.layers(packed), 0

    def loss(self, x: Tensor, index: int) -> Tensor:
        sequences = self.embedding(x[:, :, None].expand(-1, -1, WIDTH))
        lengths = (x > 0).sum(1).clamp(1)
        packed = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
        packed, added = self.through(packed, index)
        output, _ = pad_packed_sequence(packed, batch_first=True)
        return output.square().mean() + added


class PackedSkips(PackedSequences):
    """Later batches read the output of the first layer, which has the form of the second one's."""

    def through(self, packed: PackedSequence, index: int) -> tuple[PackedSequence, Any]:
        first = self.layers[0](packed)
        return self.layers[1:](first), first.data.square().mean() if index > 2 else 0


class PackedForms(PackedSequences):
    """The layers of a stage return objects of unlike forms."""

    def __init__(self) -> None:
        super().__init__()
        kinds = nn.LSTM, nn.GRU, nn.GRU, nn.GRU
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for kind in kinds)

    def through(self, packed: PackedSequence, index: int) -> tuple[PackedSequence, Any]:
        states = []
        for layer in self.layers:
            packed, state = layer(packed)
            states.append(state)
        return packed, states[0][1].square().mean() + states[-1].mean()


class SelectedRows(Validated):
    """The second half of the layers computes some of the samples."""

    def loss(self, x: Tensor, index: int) -> Tensor:
        x = self.embedding(x)
        x = x[x[:, 0] > -0.3] if index % 3 else x
        return self.residual(x).square().mean()


class SelectedBehindLayers(Validated):
    """A layer gives rows for some of the samples, in batches that are not compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*self.layers, Selecting(WIDTH, WIDTH))

    def loss(self, x: Tensor, index: int) -> Tensor:
        self.layers[-1].selects = index in (2, 4)
        return self.layers(self.embedding(x)).square().mean()


class Selecting(nn.Linear):
    selects = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x[x[:, 0] > x[:, 0].median()] if self.selects else x


class Graphs(Validated):
    """Nodes of all samples, and the edges between them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        nodes, edges, graphs = batch
        x = self.embedding(nodes)
        for layer in self.layers:
            x = x + layer(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])).tanh()
        pooled = torch.zeros(int(graphs.max()) + 1, WIDTH, dtype=x.dtype).index_add(0, graphs, x)
        return pooled.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.training_step(batch, batch_idx))


ROWS: dict[str, type[Validated]] = {
    each.__name__: each
    for each in (
        *(
            WithCentered,
            WithMasked,
            WithBiased,
            Branches,
            BranchesOfMean,
            Scaled,
            OverSamples,
            OfGivenSize,
            SomeOfGivenSize,
            PackedSequences,
            PackedSkips,
            PackedForms,
        ),
        *(SelectedRows, SelectedBehindLayers, Graphs),
    )
}


def graphs(samples: list[tuple[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Make a batch of graphs of one to four nodes, in a ring."""
    counts = [1 + int(4 * x[0].abs()) % 4 for (x,) in samples]
    nodes = torch.cat([x.expand(n, -1) for (x,), n in zip(samples, counts, strict=True)])
    index = torch.arange(len(nodes))
    of_graph = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(counts))
    return nodes, torch.stack([index, index.roll(1)]), of_graph


# Eight samples, in four micro-batches.
OPTIONS = {
    row: {"pipeline": "layers", "microbatches": 4, "loss": network.declared}
    for row, network in ROWS.items()
}


def train(row: str, strategy: Any = "auto", ranks: int = 1) -> tuple[Record, list[str]]:
    """What happened, and the warnings."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    collate = graphs if row == "Graphs" else None
    loader = DataLoader(TensorDataset(x), SAMPLES, collate_fn=collate)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        record = trained(ROWS[row], strategy, ranks, loader, loader, max_epochs=2)
    return record, [str(each.message) for each in said]


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, tuple[Record, list[str]]]]:
    return rows_on_ranks(2, train, OPTIONS)


@pytest.mark.parametrize("row", ROWS)
def test_a_batch_that_is_not_divided_is_that_of_one_process(row: str, on_ranks: Any) -> None:
    expected, _ = train(row)
    for rank in on_ranks:
        assert difference(expected, rank[row][0]) <= 1e-12
    said = [text for rank in on_ranks for text in rank[row][1]]
    assert any("stages wait for" in text for text in said)
