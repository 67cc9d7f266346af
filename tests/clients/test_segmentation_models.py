"""segmentation-models-pytorch: a U-Net as its example `binary_segmentation_intro` trains it."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from tests.clients.same import GRIDS, STEPS, assert_replicas_same, assert_same

smp = pytest.importorskip("segmentation_models_pytorch")

SIDE, BATCH = 32, 2


class Segmentation(L.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model = smp.create_model(
            "unet",
            "resnet18",
            encoder_weights=None,
            encoder_depth=depth,
            decoder_channels=(64, 32, 16, 8, 8)[-depth:],
            in_channels=3,
            classes=1,
        )
        self.loss_fn = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)

    def forward(self, image: Any) -> Any:
        return self.model(image)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss_fn(self.forward(batch["image"]), batch["mask"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=2e-4)


def train(depth: int = 3, **options: Any) -> None:
    images = torch.randn(2 * STEPS * BATCH, 3, SIDE, SIDE)
    rows = [{"image": image, "mask": (image[:1] > 0.5).float()} for image in images]
    L.Trainer(**options).fit(Segmentation(depth), DataLoader(rows, batch_size=BATCH))


@pytest.mark.parametrize("grid", GRIDS)
def test_it_prunes_as_masked_training(grid: str) -> None:
    # Its BatchNorms take their statistics of what they are given at once.
    assert_same(train, grid, **({} if grid == "one rank" else {"microbatches": 1}))


def test_replicas_train_as_ddp() -> None:
    assert_replicas_same(partial(train, 5))  # ddp refuses the parameters that others leave unused.
