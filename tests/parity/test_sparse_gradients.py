"""Embeddings with sparse gradients train on replicas as on one process."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import trainer
from tests.ranks import run_ranks


class Lookup(L.LightningModule):
    """Its rows that no batch reads keep their moments, as ``SparseAdam`` skips them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 4, sparse=True)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.table(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.parameters()), 0.1)


NUMBERS = torch.tensor([0, 1, 2, 3, 1, 1, 5, 6, 3, 3, 2, 7])


def trained(strategy: Any, devices: int, samples: list[int]) -> list[list[float]]:
    """Train three batches of these samples; return the weights."""
    module = Lookup()
    data = DataLoader(TensorDataset(NUMBERS), len(samples) // 3, sampler=samples)
    trainer(strategy, devices, max_epochs=1, use_distributed_sampler=False).fit(module, data)
    weights: list[list[float]] = module.table.weight.tolist()
    return weights


def on_replicas() -> list[list[float]]:
    from mpi4py import MPI

    own = [sample for sample in range(12) if sample % 4 // 2 == MPI.COMM_WORLD.rank]
    return trained(AxoSparseStrategy(), 2, own)


def test_sparse_adam_of_two_replicas_is_that_of_one_process() -> None:
    expected = torch.tensor(trained("auto", 1, list(range(12))))
    for weights in run_ranks(2, on_replicas):
        torch.testing.assert_close(torch.tensor(weights), expected)
