"""Metrics of torchmetrics, of words, queries and losses, and metrics computed by hand."""

from __future__ import annotations

from typing import Any

import torchmetrics as tm
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression, Scalar, Tagger


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


@entry(Classification)
def accuracy_by_hand(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    self.log("acc", (logits.argmax(dim=1) == y).float().mean(), on_epoch=True)
    return F.cross_entropy(logits, y)


@entry(Classification)
def accuracy_by_a_quotient(self: Any, x: Tensor, y: Tensor) -> Tensor:
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
