"""Schedulers, averages, and hooks of the module in the place of optimizers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Tagger


@entry(trainer={"max_epochs": 3, "callbacks": [lambda: StochasticWeightAveraging(0.05, 1)]})
class SWA(Regression):
    pass


@entry()
class WarmsUpInOptimizerStep(Regression):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)


@entry()
class StepsTheSchedulerByHand(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@entry()
class ScalesTheLossInBackward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


@entry(trainer={"max_epochs": 2})
class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "train_loss"}]


@entry(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
class AccumulatesAndClips(Tagger):
    pass


@entry(strategy={"microbatches": 1})
class OneMicroBatch(Regression):
    pass


@entry()
class FrozenBackbone(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05)
