"""Batches of every form, and loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.corpus.harness import entry
from tests.corpus.modules import SAMPLES, Regression


class Samples(Dataset):
    """Each with a name and a number beside its tensors."""

    def __init__(self, seed: int) -> None:
        self.rows = list(Regression.dataset(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return *self.rows[index], f"sample {index}", index


@entry(Regression, loaders=lambda seed: DataLoader(Samples(seed), SAMPLES))
def strings_and_numbers(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y, names, index = batch
    assert len(names) == len(x) == len(index)
    return F.mse_loss(self(x), y)


def _lists(samples: list[Any]) -> Any:
    return [x for x, _ in samples], [y for _, y in samples]


@entry(Regression, loaders=lambda seed: DataLoader(Regression.dataset(seed), 8, collate_fn=_lists))
def lists_of_tensors(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As detection batches are: one tensor a sample."""
    xs, ys = batch
    return F.mse_loss(self(torch.stack(xs)), torch.stack(ys))


@entry(Regression, loaders=lambda seed: DataLoader(Regression.dataset(seed), 23))
def last_batch_is_one_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y)
