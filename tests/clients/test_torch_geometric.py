"""torch_geometric: classifies graphs as `examples/pytorch_lightning/gin.py` does."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse import AxoSparseStrategy
from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same, run

pytest.importorskip("torch_geometric")

from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool

BATCH, NODES, FEATURES, CLASSES = 4, 6, 5, 3


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.gnn = GIN(FEATURES, 16, num_layers=3, dropout=0.0, jk="cat")
        self.classifier = MLP([16, 16, CLASSES], norm="batch_norm", dropout=0.0)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.gnn(x, edge_index)
        return self.classifier(global_add_pool(x, batch))

    def training_step(self, data: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(**options: Any) -> None:
    graphs = [
        Data(
            x=torch.randn(NODES, FEATURES).double(),
            edge_index=torch.randint(NODES, (2, 12)),
            y=torch.randint(CLASSES, (1,)),
        )
        for _ in range(2 * STEPS * BATCH)
    ]
    L.Trainer(**options).fit(Model(), datamodule=LightningDataset(graphs, batch_size=BATCH))


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid, pipeline=["gnn.convs", "classifier"])


def test_a_norm_between_layers_is_refused() -> None:
    words = r"'classifier\.norms\.0\.module\.running_mean' changes between layers"
    with pytest.raises(MisconfigurationException, match=words):
        run(train, AxoSparseStrategy(2, transport="loopback"))


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(train)
