"""Metrics of torchmetrics, of each kind of state and logged in each of the usual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics as tm
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import (
    Binary,
    Classification,
    Labels,
    Module,
    Regression,
    Scalar,
    Segmentation,
    Tagger,
)

LOSSES: dict[type, Callable[[Tensor, Tensor], Tensor]] = {
    Binary: F.binary_cross_entropy_with_logits,
    Labels: F.binary_cross_entropy_with_logits,
    Classification: F.cross_entropy,
    Segmentation: F.cross_entropy,
    Regression: F.mse_loss,
    Scalar: F.mse_loss,
}


def measured(
    base: type[Module],
    name: str,
    make: Callable[[], tm.Metric],
    inputs: Callable[[Tensor, Tensor], tuple[Any, ...]] = lambda out, y: (out, y),
) -> None:
    """Enter a module that has a metric in training and another in validation."""

    def __init__(self: Any) -> None:
        base.__init__(self)
        self.metric, self.val_metric = make(), make()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.metric(*inputs(out.detach(), y))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return LOSSES[base](out, y)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_metric.update(*inputs(self(x), y))
        self.log("val_metric", self.val_metric, prog_bar=True)

    methods = {
        "__init__": __init__,
        "training_step": training_step,
        "validation_step": validation_step,
        "__module__": __name__,
    }
    entry()(type(name, (base,), methods))


def _probabilities(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of logits, torchmetrics takes the sigmoid only where not all are between 0 and 1."""
    return out.sigmoid(), y.long()


measured(
    Classification,
    "AccuracyMacro",
    lambda: tm.Accuracy("multiclass", num_classes=4, average="macro"),
)
measured(
    Classification,
    "AreaUnderCurve",
    lambda: tm.AUROC("multiclass", num_classes=4),
    lambda out, y: (out.softmax(-1), y),
)
measured(Binary, "AveragePrecision", lambda: tm.AveragePrecision("binary"), _probabilities)
measured(Scalar, "SpearmanCorrCoef", tm.SpearmanCorrCoef)
measured(Scalar, "MaxMetric", tm.MaxMetric, lambda out, y: (out,))
measured(
    Segmentation,
    "PeakSignalNoiseRatio",
    lambda: tm.image.PeakSignalNoiseRatio(data_range=2.0),
    lambda out, y: (out[:, 0], y.float()),
)


@entry()
class MeanMetricOfTheLoss(Regression):
    """As the hydra template's modules keep their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.train_mean, self.val_mean, self.val_best = (
            tm.MeanMetric(),
            tm.MeanMetric(),
            tm.MinMetric(),
        )

    def on_train_start(self) -> None:
        self.val_mean.reset()
        self.val_best.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.train_mean(loss)
        self.log("train/loss", self.train_mean, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_mean(self.loss(*batch))
        self.log("val/loss", self.val_mean, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_best(self.val_mean.compute())
        self.log("val/best", self.val_best.compute(), sync_dist=True, prog_bar=True)


@entry()
class CollectionOfMetrics(Classification):
    def __init__(self) -> None:
        super().__init__()
        metrics = tm.MetricCollection(
            {
                "acc": tm.Accuracy("multiclass", num_classes=4),
                "f1": tm.F1Score("multiclass", num_classes=4, average="macro"),
            }
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.train_metrics.update(logits, y)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.val_metrics.update(self(x), y)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


@entry()
class LogsWhatTheMetricReturns(Classification):
    """The value of the batch instead of the metric itself."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = tm.Accuracy("multiclass", num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("acc", self.accuracy(logits, y), prog_bar=True)
        return F.cross_entropy(logits, y)


@entry()
class LogsAMacroScoreInEachStep(Classification):
    """A function of the batch's counts, by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.f1 = tm.F1Score("multiclass", num_classes=4, average="macro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


@entry()
class ComputesAtTheEndOfTheEpoch(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = tm.ConfusionMatrix("multiclass", num_classes=4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.matrix.update(self(x), y)

    def on_validation_epoch_end(self) -> None:
        matrix = self.matrix.compute().float()
        recall = matrix.diag() / matrix.sum(1).clamp(min=1)
        self.log("val_balanced", recall.mean())
        self.matrix.reset()


@entry()
class RetrievalWithIndexes(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.precision_mean = tm.retrieval.RetrievalMAP()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        queries = (x[:, 0] > 0).long()
        self.precision_mean.update(self(x), y > 0, indexes=queries)
        self.log("val_map", self.precision_mean)


@entry()
class PerplexityOfTokens(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.perplexity = tm.text.Perplexity(ignore_index=-100)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.perplexity.update(self(batch["words"]), batch["labels"])
        self.log("val_ppl", self.perplexity, batch_size=8)


@entry()
class WordErrors(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.errors = tm.text.WordErrorRate()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        guess = self(batch["words"]).argmax(-1).tolist()
        truth = batch["words"].tolist()
        self.errors.update(
            [" ".join(map(str, row)) for row in guess], [" ".join(map(str, row)) for row in truth]
        )
        self.log("val_wer", self.errors, batch_size=8)


class Tolerance(tm.Metric):
    """A metric of the user's own."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hits", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, out: Tensor, y: Tensor) -> None:
        self.hits += ((out - y).abs() < 1.0).sum()
        self.total += y.numel()

    def compute(self) -> Tensor:
        return self.hits.float() / self.total


measured(Regression, "MetricOfOnesOwn", Tolerance)
measured(Scalar, "CatMetricAsList", lambda: _Spread(), lambda out, y: (out,))


class _Spread(tm.CatMetric):
    """Keeps all values, for a quantile."""

    def compute(self) -> Tensor:
        return torch.quantile(super().compute(), 0.9)


@entry(Classification)
def accuracy_by_hand(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    self.log("acc", (logits.argmax(dim=1) == y).float().mean(), on_epoch=True)
    return F.cross_entropy(logits, y)


@entry(Classification)
def accuracy_by_a_quotient(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    correct = (logits.argmax(1) == y).sum().item()
    self.log("acc", correct / len(y), prog_bar=True)
    return F.cross_entropy(logits, y)


@entry(Classification, hook="validation_step")
def validates_accuracy_by_topk(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    guess = self(x).topk(2, dim=1).indices
    self.log("val_top2", (guess == y[:, None]).any(1).float().mean())


@entry(Tagger)
def accuracy_of_tokens(self: Any, batch: Any, batch_idx: int) -> Tensor:
    logits, labels = self(batch["words"]), batch["labels"]
    kept = labels != -100
    self.log("acc", ((logits.argmax(-1) == labels) & kept).sum() / kept.sum(), batch_size=8)
    return F.cross_entropy(logits.mT, labels)
