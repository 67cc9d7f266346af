"""Values of validation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import R2Score

from tests.corpus.harness import entry
from tests.corpus.modules import Regression, Scalar


@entry(strategy={"microbatches": None}, equal=True)
class R2OfSingleSamples(Scalar):
    """An update of R2Score needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.r2 = R2Score()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.r2(out, y)
        self.log("r2", self.r2, on_step=True, on_epoch=True)
        return F.mse_loss(out, y)


@entry(Regression, hook="validation_step")
def standardizes_in_validation(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    x = (x - x.mean(0)) / x.std(0)
    self.log("val_loss", F.mse_loss(self(x), y))
