"""Steps that run backward passes of their own train as on one process, or are refused in words."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record, difference, trained

WIDTH, REFUSED = 6, "runs a backward pass of its own.*on another stage.*g_inter=1"


class Steep(nn.Module):
    """A layer that returns the gradient of an energy of its input, as some force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        energy = self.energy(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - force


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.net = nn.Sequential(*layers, Steep())
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch[0].clone())

    def loss(self, x: Tensor) -> Tensor:
        return self.head(self.net(x)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Behind(Module):
    """Differentiates the head by what the layers return, by both functions."""

    def loss(self, x: Tensor) -> Tensor:
        z = self.net(x)
        leaf = z.detach().requires_grad_()
        self.head(leaf).pow(2).sum().backward()
        (slope,) = torch.autograd.grad(self.head(z).pow(2).sum(), z, create_graph=True)
        (part,) = torch.autograd.grad(
            self.head(z).pow(2).sum(), self.head.weight, create_graph=True
        )
        penalty = slope.pow(2).sum(1).mean() + 0 * part.sum()
        return self.head(z + 0.1 * leaf.grad.sign()).pow(2).mean() + penalty


class Before(Module):
    """Moves samples before the layers see them; stages do so alike."""

    def loss(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        self.head(x).pow(2).sum().backward()
        return super().loss(x + x.grad)


class Penalized(Module):
    """A gradient penalty by the input, as of a critic."""

    def loss(self, x: Tensor) -> Tensor:
        out = self.head(self.net(x.requires_grad_()))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.pow(2).mean() + (slope.norm(2, dim=1) - 1).pow(2).mean()


class PartlySeen(Module):
    """The same, where a part of the gradient would be there, or none and no error."""

    def loss(self, x: Tensor) -> Tensor:
        out = self.head(x.requires_grad_() + self.net(2 * x))
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True, allow_unused=True)
        return out.pow(2).mean() + slope.pow(2).sum(1).mean()


def train(kind: type[Module], strategy: Any, devices: int = 1) -> Record:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, WIDTH, dtype=torch.float64, generator=generator)
    return trained(kind, strategy, devices, DataLoader(TensorDataset(x), 8), max_epochs=1)


@pytest.mark.parametrize("kind", [Module, Behind, Before])
def test_inside_a_layer_before_and_behind_the_layers_it_is_right(kind: type[Module]) -> None:
    expected = train(kind, "auto")
    for stages in (1, 2):
        strategy = AxoSparseStrategy(stages, 4, pipeline="net", transport="loopback")
        assert difference(expected, train(kind, strategy)) < 1e-12


@pytest.mark.parametrize("kind", [Penalized, PartlySeen])
def test_through_layers_of_other_stages_it_is_refused(kind: type[Module]) -> None:
    record = train(kind, AxoSparseStrategy(microbatches=4))
    assert difference(train(kind, "auto"), record) < 1e-12
    strategy = AxoSparseStrategy(2, 4, pipeline="net", transport="loopback")
    with pytest.raises(MisconfigurationException, match=REFUSED):
        train(kind, strategy)


def test_the_last_stage_refuses_it_and_the_job_ends() -> None:
    with pytest.raises(MisconfigurationException, match=rf"(?s){REFUSED}.*\nOn rank 0 \(stage 1 "):
        train(Penalized, AxoSparseStrategy(g_inter=2, pipeline="net"), devices=2)
