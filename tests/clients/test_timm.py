"""timm: a vision transformer, as classifiers train it."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same

timm = pytest.importorskip("timm")

SIDE, CLASSES, BATCH = 16, 5, 4


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=SIDE,
            patch_size=4,
            embed_dim=24,
            num_heads=2,
            depth=4,
            num_classes=CLASSES,
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.model(images), labels)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(**options: Any) -> None:
    count = 2 * STEPS * BATCH
    data = TensorDataset(torch.randn(count, 3, SIDE, SIDE), torch.randint(CLASSES, (count,)))
    L.Trainer(**options).fit(Classifier(), DataLoader(data, BATCH))


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(train)
