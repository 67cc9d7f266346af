"""Muon for matrices and Adam for the rest, as one optimizer with groups, trains on stages."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, trainer
from tests.ranks import run_ranks


class MuonAndAdam(Optimizer):
    """Momentum made orthogonal for groups with ``use_muon``, Adam for the others."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "use_muon": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self.muon if group["use_muon"] else self.adam
                    parameter.sub_(group["lr"] * update(parameter, self.state[parameter]))
        return loss

    def muon(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(parameter))
        momentum.mul_(0.9).add_(parameter.grad)
        made = momentum / momentum.norm()
        for _ in range(5):  # Newton and Schulz; rounding is not amplified much.
            made = 1.5 * made - 0.5 * made @ made.T @ made
        return made

    def adam(self, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        mean = state.setdefault("mean", torch.zeros_like(parameter))
        square = state.setdefault("square", torch.zeros_like(parameter))
        mean.lerp_(parameter.grad, 0.1)
        square.lerp_(parameter.grad**2, 0.01)
        return mean / (square.sqrt() + 1e-8)


class OneClass(Net):
    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "use_muon": True},
            {"params": [p for p in parameters if p.dim() != 2]},
        ]
        return MuonAndAdam(groups, lr=0.01)


class OfTorch(Net):
    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        return Muon([p for p in self.parameters() if p.dim() == 2], lr=0.01)


def train(kind: type[Net], ranks: int = 1, **grid: Any) -> Record:
    L.seed_everything(0, verbose=False)
    strategy = AxoSparseStrategy(microbatches=2, **grid) if grid else "auto"
    return fit(trainer(strategy, ranks, precision="64-true"), kind().double())


def on_two_ranks() -> list[Record]:
    return [train(kind, 2, g_inter=2) for kind in (OneClass, OfTorch)]


def test_two_stages_train_as_one_process() -> None:
    first, _ = run_ranks(2, on_two_ranks)
    for kind, record in zip((OneClass, OfTorch), first, strict=True):
        assert difference(train(kind), record) < 1e-12
