"""Layers that change their weight in `forward`, as masked convolutions do, train in a pipeline.

They do so before and after a ticket was drawn, with several micro-batches between forward and
backward: what is written through `.data` is no change that autograd has to know.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import CLASSES, FEATURES, Net, Record, difference, fit, trainer

WIDTH = 16


class MaskedConvolution(nn.Conv2d):
    """That of PixelCNN."""

    def __init__(self) -> None:
        super().__init__(WIDTH // 4, WIDTH // 4, 3, padding=1)
        self.register_buffer("mask", torch.ones_like(self.weight))
        self.mask[:, :, 2:] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x.unflatten(1, (-1, 2, 2))).flatten(1).tanh()


class MaskedLinear(nn.Linear):
    """That of MADE, as it is often written."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones_like(self.weight).tril())

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * self.mask
        return super().forward(x).tanh()


class Clamped(nn.Module):
    """A layer that clamps the weight of a part, as critics do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return self.linear(x)


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        layers = [MaskedConvolution(), MaskedLinear(), Clamped()]
        self.model = nn.Sequential(
            nn.Linear(FEATURES, WIDTH), *layers, nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )


def train(strategy: Any, compute: Any, draw: int) -> Record:
    L.seed_everything(0, verbose=False)
    ticket = EarlyBirdTicket(0.6, every=1, draw_by=draw, compute=compute)
    run = trainer(strategy, max_epochs=1, precision="64-true", callbacks=[ticket])
    return fit(run, Masked())


@pytest.mark.parametrize("compute", ["auto", "samo"])
def test_micro_batches_in_flight_see_weights_that_forward_changes(compute: str) -> None:
    expected = train(AxoSparseStrategy(), compute, draw=4)
    strategy = AxoSparseStrategy(2, 4, transport="loopback")
    assert difference(expected, train(strategy, compute, draw=4)) < 1e-12
