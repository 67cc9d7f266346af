"""Values of validation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import R2Score
from torchmetrics.classification import BinarySpecificity
from torchmetrics.functional import r2_score

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Classification, Regression, Scalar


class Scaled(Scalar):
    """Validates in the unit of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("y_std", torch.tensor(1.7))
        self.register_buffer("offset", torch.tensor(3.0))


@entry(Scaled, hook="validation_step", equal=True)
def nanmean_in_the_unit_of_the_data(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_mae", torch.nanmean((self(x) - y).abs()) * self.y_std)


@entry(Scaled, hook="validation_step", equal=True)
def product_plus_a_buffer(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    e = self(x) - y
    self.log("val_mse", e @ e / len(e) + 1e-4 * self.offset)


@entry(Scaled, hook="validation_step", equal=True)
def einsum_times_a_buffer(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    e = self(x) - y
    self.log("val_mse", torch.einsum("i,i->", e, e) / e.numel() * self.y_std)


@entry(Scaled, hook="validation_step", equal=True)
def numpy_mean_times_a_buffer(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    error = (self(x) - y).abs().numpy().mean()
    self.log("val_mae", self.y_std * float(error))


@entry(Scaled, hook="validation_step", equal=True)
def tensor_of_a_number(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_mae", torch.tensor((self(x) - y).abs().mean().item()))


@entry(Scaled, hook="validation_step", equal=True)
def tensor_of_a_maximum(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_worst", torch.as_tensor(max((self(x) - y).abs().tolist())))


@entry(Scaled, hook="validation_step", equal=True)
def mean_in_the_unit_of_the_data(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_mae", (self(x) - y).abs().mean() * self.y_std)


@entry(Scaled, hook="validation_step")
def median_error(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_median", torch.nanmedian((self(x) - y).abs()))


@entry(Scaled, hook="validation_step")
def r2_by_function(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_r2", r2_score(self(x), y))


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


@entry(Classification, hook="validation_step")
def balanced_accuracy_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    guess = self(x).argmax(-1)
    rates = [(guess[y == label] == label).float().mean() for label in y.unique()]
    self.log("val_balanced", torch.stack(rates).mean())


@entry(Classification, hook="validation_step", equal=True)
def confusion_by_bincount(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    guess = self(x).argmax(-1)
    matrix = torch.bincount(4 * y + guess, minlength=16).view(4, 4).float()
    iou = matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag()).clamp(min=1)
    self.log("val_iou", iou.mean())


@entry(Regression, hook="validation_step", equal=True)
def worst_of_three_means(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    errors = (self(x) - y).abs().mean(0)
    self.log("val_worst", errors.max())


@entry(Regression, hook="validation_step")
def relative_norm_of_validation(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_relative", torch.linalg.norm(self(x) - y) / torch.linalg.norm(y))


@entry(equal=True)
class CollectsOutputs(Regression):
    """Collects what the epoch's end evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.outputs.append(F.mse_loss(self(x), y))

    def on_validation_epoch_end(self) -> None:
        self.log("val_rmse", torch.stack(self.outputs).sqrt().mean())
        self.outputs.clear()


@entry(equal=True)
class CountsBatches(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.total, self.batches = 0.0, 0

    def on_validation_epoch_start(self) -> None:
        self.total, self.batches = 0.0, 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.total += F.mse_loss(self(x), y, reduction="sum").item()
        self.batches += 1

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.total / self.batches)


@entry(Regression, hook="validation_step")
def standardizes_in_validation(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    x = (x - x.mean(0)) / x.std(0)
    self.log("val_loss", F.mse_loss(self(x), y))


@entry(Scalar, hook="validation_step", equal=True)
def minimum_over_samples(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_best", (self(x) - y).abs().amin())


@entry(Scalar, hook="validation_step")
def share_above_the_mean(self: Any, batch: Any, batch_idx: int) -> None:
    p = self(batch[0])
    self.log("val_share", (p > p.mean()).float().mean())


@entry(Scalar, hook="validation_step", equal=True)
def all_and_any(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    p = self(x)
    self.log("val_all", ((p - y).abs() < 2.0).all().float())
    self.log("val_any", ((p - y).abs() > 2.0).any().float())


@entry(Regression, hook="validation_step")
def mean_of_a_column_by_index(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    errors = (self(x) - y).pow(2).mean(0).tolist()
    self.log_dict({f"val_{number}": error**0.5 for number, error in enumerate(errors)})


@entry(equal=True)
class BinaryMetricOfLogits(Binary):
    """Torchmetrics takes the sigmoid of an update only if not all of it are probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.specificity = BinarySpecificity()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.specificity.update(self(x) + 0.5, y.long())
        self.log("val_specificity", self.specificity)
