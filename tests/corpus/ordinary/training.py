"""Optimizers, schedulers, Trainer flags, callbacks and hooks."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression, Tagger

DOUBLE = {"precision": "64-true"}
"""Optimizers that divide by the size of a gradient make rounding visible."""


class Double(Regression):
    @classmethod
    def dataset(cls, seed: int) -> Any:
        x, y = super().dataset(seed).tensors
        return torch.utils.data.TensorDataset(x.double(), y.double())


@entry(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1})
class AccumulatesAndClips(Tagger):
    pass


@entry(trainer={"gradient_clip_val": 0.1})
class ClipsByNorm(Regression):
    pass


@entry(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
class ClipsByValue(Regression):
    pass


@entry(trainer={"max_epochs": 2, "check_val_every_n_epoch": 2})
class ValidatesEverySecondEpoch(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


@entry(trainer={"val_check_interval": 1})
class ValidatesAfterEachBatch(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


@entry(trainer={"max_steps": 4, "max_epochs": -1})
class LimitsSteps(Classification):
    pass


@entry(strategy={"microbatches": 3})
class ThreeMicroBatches(Tagger):
    pass


@entry(strategy={"microbatches": None})
class DefaultMicroBatches(Tagger):
    pass


@entry(strategy={"microbatches": 1})
class OneMicroBatch(Regression):
    pass


def optimized(name: str, make: Any, **options: Any) -> None:
    """Enter a module with another optimizer."""

    def configure_optimizers(self: Any) -> Any:
        return make(self)

    methods = {"configure_optimizers": configure_optimizers, "__module__": __name__}
    options = {"trainer": {**DOUBLE, "max_epochs": 2}, **options}
    entry(**options)(type(name, (Double,), methods))


optimized("AdamW", lambda self: torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1))
optimized("Adagrad", lambda self: torch.optim.Adagrad(self.parameters(), 1e-2))


def _groups(self: Any) -> Any:
    decayed = [p for p in self.parameters() if p.dim() > 1]
    others = [p for p in self.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], 1e-2
    )


optimized("Groups", _groups)


def _schedule(make: Any, **config: Any) -> Any:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), **config},
        }

    return configure


SCHEDULERS = torch.optim.lr_scheduler
optimized(
    "WarmUp",
    _schedule(lambda o: SCHEDULERS.LambdaLR(o, lambda n: min(1, (n + 1) / 4)), interval="step"),
)
optimized(
    "Plateau",
    _schedule(lambda o: SCHEDULERS.ReduceLROnPlateau(o, patience=0), monitor="train_loss"),
)


@entry(trainer={"max_epochs": 2, "callbacks": [lambda: EMAWeightAveraging(decay=0.9)]})
class EMA(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


@entry(trainer={"max_epochs": 3, "callbacks": [lambda: StochasticWeightAveraging(0.05, 1)]})
class SWA(Regression):
    pass


@entry(trainer={"max_epochs": 3, "callbacks": [lambda: EarlyStopping("val_loss", patience=0)]})
class StopsEarly(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch))


@entry(trainer={"max_epochs": 2, "callbacks": [lambda: GradientAccumulationScheduler({1: 3})]})
class AccumulatesLater(Regression):
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
        return [optimizer], [{"scheduler": SCHEDULERS.ExponentialLR(optimizer, 0.5),
                              "interval": "step"}]  # fmt: skip

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@entry()
class ClipsByItself(Regression):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@entry()
class LogsGradientNorms(Regression):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm())


@entry()
class ScalesTheLossInBackward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


@entry()
class ChangesTheBatchInAHook(Regression):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y


@entry()
class CountsInHooks(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.batches, self.samples, self.epochs = 0, 0, 0
        self.last = 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches += 1
        self.samples += len(batch[0])
        self.last = float(outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.epochs += 1
        self.log("batches", float(self.batches))


@entry()
class TeacherInAHook(Regression):
    """An average of the weights that a hook moves along after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.teacher = nn.Linear(3, 3).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self(x)
        return F.mse_loss(self.head(z), y) + F.mse_loss(self.head(z), self.teacher(z).detach())

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                old.lerp_(new, 0.1)


@entry()
class WeightsByTheEpoch(Regression):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        weight = min(1.0, (self.current_epoch + 1) / 5)
        return F.mse_loss(out, y) + weight * out.pow(2).mean()


@entry()
class ReturnsADict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        return {"loss": F.mse_loss(out, y), "predictions": out.detach()}


@entry(trainer={"max_epochs": 2})
class FreezesAfterAnEpoch(Regression):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.model[0].requires_grad_(False)
