"""A module that logs in every way that Lightning knows."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import ClasswiseWrapper, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassPrecision,
    MulticlassRecall,
)

CLASSES = 4


class Peak(Metric):
    """Largest value so far, and how often it rose: what one update does depends on the others."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("peak", torch.zeros(()), dist_reduce_fx="max")
        self.add_state("rises", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        for value in values:
            self.rises += value > self.peak
            self.peak = torch.maximum(self.peak, value)

    def compute(self) -> Tensor:
        return self.peak + self.rises


class LogsEverything(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, CLASSES))
        accuracy = MulticlassAccuracy(CLASSES, average="macro")
        self.accuracy = accuracy
        self.accuracy_tensor = accuracy.clone()
        self.auroc = MulticlassAUROC(CLASSES)
        self.weighted = MeanMetric()
        self.peak = Peak()
        self.ratio = MulticlassAccuracy(CLASSES) / MulticlassRecall(CLASSES, average="micro")
        scores = MetricCollection(
            MulticlassPrecision(CLASSES, average="macro"),
            MulticlassRecall(CLASSES, average="macro"),
        )
        self.scores = scores.clone(prefix="train_")
        self.score_tensors = scores.clone(prefix="value_")
        self.val_scores = scores.clone(prefix="val_")
        self.val_accuracy = accuracy.clone()
        self.per_class = ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))
        self.by_hand: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.log("before_the_model", x.square().mean())
        logits = self.net(x)
        each = F.cross_entropy(logits, y, reduction="none")
        loss = each.mean()
        both = {"on_step": True, "on_epoch": True}
        self.log("loss", loss, prog_bar=True, sync_dist=True, **both)
        self.log("step_only", loss, on_step=True, on_epoch=False)
        self.log("epoch_only", loss, on_step=False, on_epoch=True, logger=False)
        self.log("correct", (logits.argmax(1) == y).sum().float(), reduce_fx="sum", **both)
        self.log("largest", each.max(), reduce_fx=torch.max, **both)
        self.log("smallest", each.min(), reduce_fx=min, **both)
        self.log("number", 3, **both)
        self.log("double", loss.double(), **both)
        self.log("half", x.new_full((), 1.5).bfloat16(), **both)
        # A mean over some of the samples only, whose number the user tells.
        chosen = y < 2
        if chosen.any():
            self.log("chosen", each[chosen].mean(), batch_size=int(chosen.sum()), **both)
        self.log_dict({"a": loss * 2, "b": loss + 1}, **both)

        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, prog_bar=True, **both)
        self.log("accuracy_tensor", self.accuracy_tensor(logits, y), on_step=True)
        self.auroc.update(logits.softmax(1), y)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.weighted(each.detach(), y.float() + 1)
        self.log("weighted", self.weighted, **both)
        self.peak(each.detach())
        self.log("peak", self.peak, **both)
        self.ratio(logits, y)
        self.log("ratio", self.ratio, **both)
        self.scores(logits, y)
        self.log_dict(self.scores, **both)
        self.log_dict(self.score_tensors(logits, y), on_step=True)
        self.log_dict(self.per_class(logits, y), on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)
        self.log(f"own_name_{dataloader_idx}", loss, add_dataloader_idx=False)
        if dataloader_idx == 0:
            self.val_scores.update(logits, y)
            self.val_accuracy.update(logits, y)
        return loss

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_scores.compute())
        self.by_hand.append(float(self.val_accuracy.compute()))
        self.log("by_hand", self.val_accuracy)
        self.val_scores.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _data(self, seed: int, samples: int) -> DataLoader:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 6, generator=generator)
        y = torch.randint(CLASSES, (samples,), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=11)

    def train_dataloader(self) -> DataLoader:
        return self._data(1, 38)

    def val_dataloader(self) -> list[DataLoader]:
        return [self._data(2, 30), self._data(3, 13)]
