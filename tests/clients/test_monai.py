"""MONAI: segments volumes as its tutorial `spleen_segmentation_3d_lightning` does."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same

pytest.importorskip("monai")

from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.layers import Norm
from monai.networks.nets import UNet

SIDE, BATCH = 16, 2


class Segmentation(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self._model = UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1, norm=Norm.BATCH)
        self.loss_function = DiceLoss(to_onehot_y=True, softmax=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._model(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self._model.parameters(), 1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch["image"], batch["label"]
        output = self.forward(images)
        loss = self.loss_function(output, labels)
        return {"loss": loss, "log": {"train_loss": loss.item()}}


def train(**options: Any) -> None:
    images = torch.randn(2 * STEPS * BATCH, 1, SIDE, SIDE, SIDE)
    rows = [{"image": image, "label": (image > 0.5).float()} for image in images]
    L.Trainer(**options).fit(Segmentation(), DataLoader(Dataset(rows), batch_size=BATCH))


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    assert_same(train, grid)


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(train)
