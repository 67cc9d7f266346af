"""Batches of every form, and loaders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.corpus.harness import entry
from tests.corpus.modules import SAMPLES, Regression, Tagger, numbers


def _rows(seed: int) -> tuple[Tensor, Tensor]:
    return Regression.dataset(seed).tensors


class Samples(Dataset):
    """Samples that a function makes of rows."""

    def __init__(self, seed: int, make: Any) -> None:
        self.rows, self.make = list(zip(*_rows(seed), strict=True)), make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.make(*self.rows[index], index)


def loaded(make: Any, **options: Any) -> Any:
    return lambda seed: DataLoader(Samples(seed, make), batch_size=SAMPLES, **options)


@entry(Regression, loaders=loaded(lambda x, y, i: {"in": {"x": x}, "out": [y, 2 * y]}))
def nested(self: Any, batch: Any, batch_idx: int) -> Tensor:
    out = self(batch["in"]["x"])
    return F.mse_loss(out, batch["out"][0]) + 0.1 * F.l1_loss(out, batch["out"][1])


@entry(Regression, loaders=loaded(lambda x, y, i: (x, y, f"sample {i}", i)))
def strings_and_numbers(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y, names, index = batch
    assert len(names) == len(x) == len(index)
    return F.mse_loss(self(x), y)


@entry(Regression, loaders=lambda seed: DataLoader(Regression.dataset(seed), 7))
def last_batch_is_smaller(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)


@entry(Regression, loaders=lambda seed: DataLoader(Regression.dataset(seed), 23))
def last_batch_is_one_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)


@entry(
    Regression,
    loaders=lambda seed: DataLoader(
        Regression.dataset(seed), 8, shuffle=True, generator=numbers(seed)
    ),
)
def shuffled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)


class Stream(IterableDataset):
    def __init__(self, seed: int) -> None:
        self.columns = _rows(seed)

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.columns, strict=True)


@entry(Regression, loaders=lambda seed: DataLoader(Stream(seed), batch_size=8))
def stream_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)


def _padded(samples: list[Any]) -> Any:
    lengths = torch.tensor([int(row["lengths"]) for row in samples])
    rows = [row["words"][:n] for row, n in zip(samples, lengths, strict=True)]
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"words": words, "lengths": lengths}


@entry(Tagger, loaders=lambda seed: DataLoader(Tagger.dataset(seed), 8, collate_fn=_padded))
def padded_by_the_collate_function(self: Any, batch: dict[str, Tensor]) -> Tensor:
    words = batch["words"]
    return F.cross_entropy(self(words).mT, words, ignore_index=0)


def _lists(samples: list[Any]) -> Any:
    return [x for x, _ in samples], [y for _, y in samples]


@entry(Regression, loaders=lambda seed: DataLoader(Regression.dataset(seed), 8, collate_fn=_lists))
def lists_of_tensors(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As detection batches are: one tensor a sample."""
    xs, ys = batch
    return F.mse_loss(self(torch.stack(xs)), torch.stack(ys))


@entry(
    Regression,
    loaders=lambda seed: CombinedLoader(
        {"a": DataLoader(Regression.dataset(seed), 8), "b": DataLoader(Regression.dataset(9), 8)}
    ),
)
def two_loaders_at_once(self: Any, batch: Any, batch_idx: int) -> Tensor:
    (xa, ya), (xb, yb) = batch["a"], batch["b"]
    a, b = self(torch.cat([xa, xb])).split([len(xa), len(xb)])
    return F.mse_loss(a, ya) + 0.5 * F.mse_loss(b, yb)


@entry()
class SeveralValidationLoaders(Regression):
    def val_dataloader(self) -> Any:
        return [DataLoader(Regression.dataset(5), 8), DataLoader(Regression.dataset(6), 6)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(*batch))
