"""A VGG with BatchNorm for small images, as an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse.support.arguments import (
    COUNT,
    FRACTION,
    LAYERS,
    NOT_NEGATIVE,
    checked,
    sequence_of,
)

ImageBatch = tuple[Tensor, Tensor]

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""The blocks of VGG-16 (Simonyan & Zisserman, ICLR 2015), for images of 32 x 32 pixels."""


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 3 x 3 convolution, its BatchNorm with scales of 0.5, and a ReLU."""
    norm = nn.BatchNorm2d(outputs)
    nn.init.constant_(norm.weight, 0.5)  # As in network slimming.
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), norm, nn.ReLU())


class VGG(L.LightningModule):
    """A VGG with BatchNorm and one linear layer, as it is used on CIFAR-10.

    Logs ``train_loss``, ``val_loss``, ``val_accuracy``, ``test_loss`` and ``test_accuracy``.

    Args:
        blocks: channels of the convolutions of each block; every block but the last ends with a
            max-pooling that halves height and width.
        image_channels: channels of the images.
        classes: number of classes.
        learning_rate: learning rate of SGD with Nesterov momentum; it falls to a tenth after half
            of the steps, and to a hundredth after three quarters.
        momentum: momentum of SGD.
        weight_decay: weight decay of all parameters.

    Raises:
        ValueError: if an argument is out of range.
    """

    @checked(
        ValueError,
        blocks=sequence_of("the channels of each block, such as [[64, 64], [128, 128]]", LAYERS),
        image_channels=COUNT,
        classes=COUNT,
        learning_rate=NOT_NEGATIVE,
        momentum=FRACTION,
        weight_decay=NOT_NEGATIVE,
    )
    def __init__(
        self,
        blocks: Sequence[Sequence[int]] = VGG16,
        image_channels: int = 3,
        classes: int = 10,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.momentum = learning_rate, momentum
        self.weight_decay = weight_decay
        layers: list[nn.Module] = []
        channels = image_channels
        for number, block in enumerate(blocks):
            if number:
                layers.append(nn.MaxPool2d(2))
            for width in block:
                layers.append(convolution(channels, width))
                channels = width
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        self.model = nn.Sequential(*layers, head)
        side = 2 ** (len(blocks) - 1)
        self.example_input_array = torch.zeros(4, image_channels, side, side)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits: (batch, channels, height, width) -> (batch, classes)."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: ImageBatch, batch_idx: int) -> Tensor:
        """Compute and log the mean cross-entropy of a batch."""
        images, classes = batch
        loss = F.cross_entropy(self(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Log the mean loss and the accuracy over the validation images."""
        self._log_quality(batch, "val")

    def test_step(self, batch: ImageBatch, batch_idx: int) -> None:
        """Log the mean loss and the accuracy over the test images."""
        self._log_quality(batch, "test")

    def _log_quality(self, batch: ImageBatch, data: str) -> None:
        images, classes = batch
        logits = self(images)
        accuracy = (logits.argmax(-1) == classes).float().mean()
        self.log(f"{data}_loss", F.cross_entropy(logits, classes), prog_bar=True, sync_dist=True)
        self.log(f"{data}_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Configure SGD whose rate falls after half and three quarters of the training."""
        optimizer = torch.optim.SGD(
            self.parameters(),
            self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )
        steps = int(self.trainer.estimated_stepping_batches)
        milestones = [steps // 2, 3 * steps // 4]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
