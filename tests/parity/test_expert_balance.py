"""Experts are balanced without a loss, by a bias that follows their load, as in DeepSeek-V3."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record, difference, recorded, trainer
from tests.ranks import run_ranks

WIDTH, LENGTH, EXPERTS, LAYERS, BATCH, BATCHES = 8, 5, 4, 4, 4, 6


class Mixture(nn.Module):
    """Experts chosen by scores plus a bias, which only chooses, and a count of their tokens."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(2).indices
        self.chosen = chosen
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=EXPERTS)
        weights = scores.gather(-1, chosen)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))
        return x + (picked * weights[..., None]).sum(-2)


class Balanced(L.LightningModule):
    """Logs the largest share of tokens, and moves each bias after a batch of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(LAYERS))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        inputs = x
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.mse_loss(x, inputs.roll(1, -1))
        self.log("loss", loss, sync_dist=True)
        for number, layer in enumerate(self.layers):
            load = torch.bincount(layer.chosen.flatten(), minlength=EXPERTS)
            self.log(f"load/{number}", load.max() / load.sum(), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for layer in self.layers:
            if layer.load.is_meta:  # of another stage
                continue
            load = self.trainer.strategy.reduce(layer.load.clone(), reduce_op="sum")
            layer.bias += 0.01 * torch.sign(load.mean() - load)
            layer.load.zero_()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: Any, ranks: int = 1, replica: slice = slice(None)) -> Record:
    """Train on some of each batch's samples."""
    L.seed_everything(0, verbose=False)
    x = torch.randn(BATCHES, BATCH, LENGTH, WIDTH, dtype=torch.float64)[:, replica]
    module = Balanced().double()
    options = {"precision": "64-true", "max_epochs": 2, "use_distributed_sampler": False}
    run = trainer(strategy, ranks, **options)
    run.fit(module, DataLoader(x.flatten(0, 1), batch_size=x.shape[1]))
    return recorded(run, module)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_bias_balances_experts_over_stages(stages: int) -> None:
    expected = train("auto")
    assert expected.weights["layers.0.bias"].abs().max() > 0.02
    with warnings.catch_warnings():
        # A count of tokens adds up over micro-batches.
        warnings.filterwarnings("error", ".*changes `self.layers.*")
        record = train(AxoSparseStrategy(stages, 2, pipeline="layers", transport="loopback"))
    assert difference(expected, record) <= 1e-12


def on_ranks(stages: int) -> Record:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    second = world.rank >= world.size // 2
    replica = slice(BATCH // 2, None) if second else slice(BATCH // 2)
    return train(AxoSparseStrategy(stages, 2, pipeline="layers"), world.size, replica)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_bias_balances_experts_over_replicas(stages: int) -> None:
    expected = train("auto")
    for record in run_ranks(2 * stages, on_ranks, stages):
        torch.testing.assert_close(record.weights, expected.weights, rtol=0, atol=1e-12)
