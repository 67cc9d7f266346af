"""Steps that compute a mean over samples at first, and something else in later batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Tagger

EPOCHS = {"max_epochs": 2}
"""Six batches, of which the 1st, 2nd and 4th are compared."""

LATER = (2, 4, 5)
"""Optimizer steps before batches that are not compared."""


def is_later(self: Any) -> bool:
    return self.global_step in LATER


def rare(self: Any, y: Tensor) -> Tensor:
    """Samples of an event that no early batch has."""
    return (y[:, 0] > 0).sum() * int(is_later(self))


@entry(equal=True, trainer=EPOCHS)
class CountsRareEventsInADict(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if found := int(rare(self, y)):
            self.counts["rare"] = self.counts.get("rare", 0) + found
        return super().loss(x, y)


@entry(equal=True, trainer=EPOCHS)
class FollowsAnExtremeLater(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        if is_later(self):
            self.largest = torch.maximum(self.largest, (z - y).detach().abs().max())
        return F.mse_loss(z, y)


@entry(Tagger)
def is_trimmed_later(self: Any, batch: dict[str, Tensor]) -> Tensor:
    """The first batch is as long as its samples, and later ones are not."""
    longest = batch["mask"].sum(1).max()
    words = batch["words"][:, :longest]
    return self(words).pow(2).mean()
