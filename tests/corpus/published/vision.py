"""Image modules in the shape of templates, tutorials and libraries."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.corpus.harness import entry
from tests.corpus.modules import numbers

CLASSES, SIDE, CHANNELS, COUNT = 4, 8, 3, 24
NORMS = "Batch norms use the statistics of a micro-batch."
DOUBLE = {"precision": "64-true"}


def images(seed: int, count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = numbers(seed)
    x = torch.randn(count, CHANNELS, SIDE, SIDE, generator=generator)
    return x, x.flatten(1)[:, :CLASSES].argmax(1)


class Images(L.LightningModule):
    """Loads small images with a class."""

    @classmethod
    def loader(cls, seed: int) -> Any:
        return DataLoader(TensorDataset(*images(seed)), batch_size=8)


class SimpleDenseNet(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(inputs, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1))


@entry(reason=NORMS, trainer=DOUBLE)
class HydraTemplateMNIST(Images):
    """The hydra template: a network as an argument, a metric for each phase, a best value."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = SimpleDenseNet(CHANNELS * SIDE * SIDE, 16, CLASSES)
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.Adam(self.trainer.model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=10)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "val/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


def patches(x: Tensor, size: int) -> Tensor:
    b, c, h, w = x.shape
    x = x.reshape(b, c, h // size, size, w // size, size).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(1, 2).flatten(2, 4)
