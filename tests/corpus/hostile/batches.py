"""Batches that come ready-made, in which something is as long as the batch and is no sample's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Regression


class Ready(IterableDataset):
    """Makes batches by itself, and adds something to each of them."""

    def __init__(self, module: type, seed: int, add: Any, samples: int = 8) -> None:
        self.columns, self.add = module.dataset(seed).tensors, add
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for parts in zip(*(column.split(self.samples) for column in self.columns), strict=True):
            yield (*parts, self.add)


def ready(module: type, add: Any, samples: int = 8) -> Any:
    return lambda seed: DataLoader(Ready(module, seed, add, samples), batch_size=None)


@entry(Classification, loaders=ready(Classification, torch.tensor([0.5, 1.0, 2.0, 3.0]), 4))
def class_weights_as_long_as_the_batch(self: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(self(x), y, weight=weight)


@entry(Classification, loaders=ready(Classification, torch.tensor([0.5, 1.0, 2.0, 3.0])))
def class_weights_shorter_than_the_batch(self: Any, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(self(x), y, weight=weight)


@entry(Embedding, loaders=ready(Embedding, [f"class {number}" for number in range(8)]), equal=True)
def names_as_many_as_samples(self: Any, x: Tensor, y: Tensor, names: list[str]) -> Tensor:
    return F.cross_entropy(self(x), y) * len(names)


@entry(Embedding, loaders=ready(Embedding, {"prototypes": torch.eye(8, 5), "note": "epoch 0"}))
def prototypes_in_a_dict(self: Any, x: Tensor, y: Tensor, extra: dict[str, Any]) -> Tensor:
    return torch.cdist(self(x), extra["prototypes"]).logsumexp(1).mean()


@entry(Regression, loaders=ready(Regression, torch.eye(8)))
def a_graph_of_the_samples(self: Any, x: Tensor, y: Tensor, adjacency: Tensor) -> Tensor:
    """A graph batch: features of nodes and their adjacency."""
    return F.mse_loss(adjacency @ self(x), y)


class Offsets:
    """Batches of bags: values of all samples, and where each sample's begin."""

    def __init__(self, seed: int) -> None:
        self.batches = [
            (torch.randn(16, 6, generator=torch.Generator().manual_seed(seed + n)),
             torch.arange(0, 16, 2), torch.ones(8, 3))
            for n in range(3)
        ]  # fmt: skip


@entry(Regression, loaders=lambda seed: DataLoader(Offsets(seed).batches, batch_size=None))
def bags_by_offsets(self: Any, x: Tensor, offsets: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    bag = torch.zeros(len(offsets), dtype=torch.long)
    bag[:] = torch.arange(len(offsets))
    number = torch.bucketize(torch.arange(len(x)), offsets, right=True) - 1
    means = torch.zeros(len(offsets), 3).index_add(0, number, out) / 2
    return F.mse_loss(means, y)


class OneObject:
    """A batch that is one object, as torch_geometric makes them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *args: Any, **kwargs: Any) -> OneObject:
        return self


def _objects(seed: int) -> DataLoader:
    columns = Regression.dataset(seed).tensors
    parts = zip(*(column.split(8) for column in columns), strict=True)
    return DataLoader([OneObject(x, y) for x, y in parts], batch_size=None)


@entry(Regression, loaders=_objects, reason="It is not cut, so that micro-batches have no effect.")
def a_batch_that_is_one_object(self: Any, batch: Any, batch_idx: int) -> Tensor:
    return F.mse_loss(self(batch.x), batch.y)


class TimeFirst:
    """Sequences with the time first, as long as there are samples."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn(8, 8, 6, generator=generator), torch.randn(8, 8, 3, generator=generator))
            for _ in range(3)
        ]


@entry(Regression, loaders=lambda seed: DataLoader(TimeFirst(seed).batches, batch_size=None))
def time_first_with_as_many_steps(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Predicts changes over time."""
    return F.mse_loss(self(x).cumsum(0), y)
