"""Batches that come ready-made, in which something is as long as the batch and is no sample's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from tests.corpus.harness import entry
from tests.corpus.modules import Embedding


class Ready(IterableDataset):
    """Makes batches by itself, and adds something to each of them."""

    def __init__(self, seed: int, add: Any) -> None:
        self.columns, self.add = Embedding.dataset(seed).tensors, add

    def __iter__(self) -> Iterator[Any]:
        for parts in zip(*(column.split(8) for column in self.columns), strict=True):
            yield (*parts, self.add)


def ready(add: Any) -> Any:
    return lambda seed: DataLoader(Ready(seed, add), batch_size=None)


@entry(Embedding, loaders=ready([f"class {number}" for number in range(8)]), equal=True)
def names_as_many_as_samples(self: Any, x: Tensor, y: Tensor, names: list[str]) -> Tensor:
    return F.cross_entropy(self(x), y) * len(names)


@entry(Embedding, loaders=ready({"prototypes": torch.eye(8, 5), "note": "epoch 0"}))
def prototypes_in_a_dict(self: Any, x: Tensor, y: Tensor, extra: dict[str, Any]) -> Tensor:
    return torch.cdist(self(x), extra["prototypes"]).logsumexp(1).mean()
