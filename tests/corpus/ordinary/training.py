"""Optimizers, schedulers, and hooks of the module in their place."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Tagger

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


def optimized(name: str, make: Any, **options: Any) -> None:
    """Enter a module with another optimizer."""

    def configure_optimizers(self: Any) -> Any:
        return make(self)

    methods = {"configure_optimizers": configure_optimizers, "__module__": __name__}
    options = {"trainer": {**DOUBLE, "max_epochs": 2}, **options}
    entry(**options)(type(name, (Double,), methods))


optimized("AdamW", lambda self: torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1))


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
    "Plateau",
    _schedule(lambda o: SCHEDULERS.ReduceLROnPlateau(o, patience=0), monitor="train_loss"),
)


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
        return [optimizer], [{"scheduler": SCHEDULERS.ExponentialLR(optimizer, 0.5),
                              "interval": "step"}]  # fmt: skip

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


@entry()
class ScalesTheLossInBackward(Regression):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()
