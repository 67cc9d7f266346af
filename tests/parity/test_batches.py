"""Batches of every layout, and objects of every type between layers.

All rows run in one job of two ranks, and once more in one process, in float64.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.parity.cases import Record, difference, trained
from tests.parity.rows import rows_in_process, rows_on_ranks
from tests.parity.test_beyond_peers import Outputs, assert_same

SIZE, SAMPLES = 5, 4
WEIGHTS = torch.linspace(0.5, 2, SIZE, dtype=torch.float64)


class Moments(Dataset):
    """Series of as many moments as features, random by a generator of its own."""

    def __init__(self, samples: int) -> None:
        self.generator = torch.Generator().manual_seed(samples)
        self.noise = np.random.default_rng(samples)
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.rand(SIZE, SIZE, generator=self.generator, dtype=torch.float64)
        return x * self.noise.random(), index % SIZE


@dataclass
class Made:
    x: Tensor
    y: Tensor
    means: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.means = self.x.mean((1, 2))


def series(samples: list) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def zipped(samples: list) -> Any:
    """Lists of one tensor, and of one dict of tensors, per sample; of different lengths."""
    noise = torch.rand(1)  # drawn from the global state
    assert noise < 1
    targets = [{"y": torch.tensor(y), "box": x[: y + 1]} for x, y in samples]
    return tuple(x for x, _ in samples), tuple(targets)


def time_first(samples: list) -> Any:
    x, y = series(samples)
    return x.transpose(0, 1), y


def as_arrays(samples: list) -> Any:
    x, y = series(samples)
    return {"x": x.numpy(), "y": y.numpy()}


def as_defaultdict(samples: list) -> Any:
    x, y = series(samples)
    return defaultdict(float, x=x, y=y)


def as_dataclass(samples: list) -> Made:
    return Made(*series(samples))


class Reader(L.LightningModule):
    """Reads any of these batches by one network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(SIZE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, SIZE)
        )

    def read(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of shape (samples, moments, features), classes, and an extra a sample."""
        if isinstance(batch, Made):
            return batch.x, batch.y, batch.means
        if isinstance(batch, defaultdict):
            return batch["x"], batch["y"], torch.full((len(batch["y"]),), batch["nothing"])
        if isinstance(batch, dict):
            x, y = torch.from_numpy(batch["x"]), torch.from_numpy(batch["y"])
            return x, y, x.mean((1, 2))
        x, y, *rest = batch
        if isinstance(y, tuple):
            extra = torch.stack([target["box"].sum() for target in y])
            return torch.stack(list(x)), torch.stack([target["y"] for target in y]), extra
        if not rest:
            return x.transpose(0, 1), y, x[0].sum(1)
        return x, y, rest[0][y]

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, extra = self.read(batch)
        logits = self.layers(x).mean(1)
        losses = nn.functional.cross_entropy(logits, y, reduction="none") * (1 + extra)
        return losses, logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        losses, logits = self.losses(batch)
        self.log("loss", losses.mean(), on_epoch=True, batch_size=len(losses))
        self.log("n", len(losses), batch_size=len(losses), reduce_fx="mean")
        self.log("index", batch_idx, batch_size=len(losses))
        time = logits.detach().expand(7, -1, -1)
        return {"loss": losses.mean(), "logits": logits.detach().numpy(), "time": time}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses, logits = self.losses(batch)
        self.means = [*getattr(self, "means", []), losses.mean().detach()]
        self.log("val", losses.mean(), batch_size=len(losses))
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Swapped(Reader):
    """Turns time-first batches round once they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].transpose(0, 1), batch[1], WEIGHTS


def split_time_first(batch: Any, parts: int) -> list[Any]:
    x, y = batch
    return list(zip(x.chunk(parts, 1), y.chunk(parts), strict=True))


def split_beside_weights(batch: Any, parts: int) -> list[Any]:
    x, y, weights = batch
    return [(*part, weights) for part in zip(x.chunk(parts), y.chunk(parts), strict=True)]


@dataclass
class Pair:
    x: Tensor
    sums: Tensor


class Plain:
    def __init__(self, x: Tensor, sums: Tensor) -> None:
        self.x, self.sums = x, sums


class Named(dict):
    """Not one of the containers that torch knows."""


def of_attributes(pair: Any) -> tuple[Tensor, Tensor]:
    return pair.x, pair.sums


def of_items(pair: Any) -> tuple[Tensor, Tensor]:
    return pair["x"], pair["sums"]


def of_set(pair: set[Tensor]) -> tuple[Tensor, Tensor]:
    sums, x = sorted(pair, key=lambda tensor: tensor.shape[1])
    return x, sums


# What layers hand to each other: how it is made of two tensors, and how they are taken out.
OBJECTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]]
OBJECTS = {
    "a dataclass": (Pair, of_attributes),
    "an object of a plain class": (Plain, of_attributes),
    "a namespace": (lambda x, sums: SimpleNamespace(x=x, sums=sums), of_attributes),
    "a UserDict": (lambda x, sums: UserDict(x=x, sums=sums), of_items),
    "a subclass of dict": (lambda x, sums: Named(x=x, sums=sums), of_items),
    "a set": (lambda x, sums: {x, sums}, of_set),
}


class Handed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(SIZE, SIZE), kind

    def forward(self, pair: Any) -> Any:
        pack, unpack = OBJECTS[self.kind]
        x, sums = unpack(pair)
        x = self.linear(x).tanh()
        return pack(x, sums + x.square().mean(1, keepdim=True))


class Handing(Reader):
    """Its layers give objects with two tensors to each other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.Sequential(*(Handed(kind) for _ in range(4))), kind

    def losses(self, batch: Any) -> tuple[Tensor, Tensor]:
        (x, y), (pack, unpack) = batch, OBJECTS[self.kind]
        logits, sums = unpack(self.layers(pack(x.mean(1), x[:, 0, :1])))
        losses = nn.functional.cross_entropy(logits, y, reduction="none") * (1 + sums.squeeze(1))
        return losses, logits


ROWS: dict[str, tuple[Callable[[], Reader], Callable[[list], Any], Any]] = {
    "lists of tensors": (Reader, zipped, None),
    "time first": (Reader, time_first, split_time_first),
    "numpy arrays": (Reader, as_arrays, None),
    "a defaultdict": (Reader, as_defaultdict, None),
    "a dataclass with a field made later": (Reader, as_dataclass, None),
    "a hook that turns batches round": (Swapped, time_first, split_beside_weights),
    **{f"{kind} between layers": (partial(Handing, kind), series, None) for kind in OBJECTS},
}


# Four samples, in three micro-batches: two of one sample and one of two; or in two.
OPTIONS = {row: {"microbatches": 3, "split_batch": split} for row, (_, _, split) in ROWS.items()}


def train(row: str, strategy: Any = "auto", ranks: int = 1) -> tuple[Record, list[Any], list[Any]]:
    kind, collate, _ = ROWS[row]
    outputs = Outputs()
    training = DataLoader(Moments(11), SAMPLES, shuffle=True, collate_fn=collate)
    validation = DataLoader(Moments(SAMPLES), SAMPLES, collate_fn=collate)
    loaders = training, validation
    record = trained(kind, strategy, ranks, *loaders, max_epochs=2, callbacks=[outputs])
    return record, outputs.trained, outputs.validated


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return [*rows_on_ranks(2, train, OPTIONS), rows_in_process(2, train, OPTIONS)]


@pytest.mark.parametrize("row", ROWS)
def test_a_pipeline_does_what_one_process_does(row: str, runs: list[dict[str, Any]]) -> None:
    expected = train(row)
    assert len(expected[1]) == 6
    for run in runs:
        assert difference(expected[0], run[row][0]) <= 1e-12
    for run in runs[::2]:  # The last stage, of ranks the first, returns all of the step's output.
        assert_same(run[row][1:], expected[1:])
