"""The usual ways to call losses of torch, and losses of papers with state of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import CLASSES, Classification, Embedding, Regression, Tagger


def criterion(base: type, name: str, make: Callable[[], nn.Module]) -> None:
    """Enter a module whose loss is a layer of torch."""

    def __init__(self: Any) -> None:
        base.__init__(self)
        self.criterion = make()

    def loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self(x), y)

    entry()(type(name, (base,), {"__init__": __init__, "loss": loss, "__module__": __name__}))


criterion(Regression, "MSELossSum", lambda: nn.MSELoss(reduction="sum"))
criterion(Classification, "CrossEntropyLoss", nn.CrossEntropyLoss)
criterion(
    Classification,
    "CrossEntropyLossWeighted",
    lambda: nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 3.0])),
)
criterion(Classification, "CrossEntropyLossIgnoring", lambda: nn.CrossEntropyLoss(ignore_index=0))


@entry()
class AdaptiveLogSoftmax(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(5, CLASSES, cutoffs=[2])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self(x), y).loss


@entry(Tagger)
def ctc_loss(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logp = self(batch["words"]).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(batch["words"]),), logp.shape[0])
    targets = batch["words"][:, :2].clamp(min=1)
    sizes = torch.full_like(lengths, 2)
    return nn.CTCLoss(zero_infinity=True)(logp, targets, lengths, sizes)


@entry(Tagger)
def masked_by_an_index(self: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["mask"]
    return F.cross_entropy(self(batch["words"])[mask], batch["labels"][mask])


@entry()
class DistillsATeacher(Classification):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, CLASSES).requires_grad_(False).eval()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return -(target * self(x).log_softmax(-1)).sum(-1).mean()


@entry()
class ArcFace(Embedding):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 5))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self(x)), F.normalize(self.weight))
        theta = torch.acos(cosine.clamp(-0.999, 0.999))
        margin = F.one_hot(y, CLASSES) * 0.2
        return F.cross_entropy(8 * torch.cos(theta + margin), y)


@entry()
class UncertaintyWeights(Regression):
    """Multi-task losses weighted by learned variances."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(3))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, total = self(x), torch.zeros(())
        for number in range(3):
            precision = torch.exp(-self.log_vars[number])
            loss = F.mse_loss(out[:, number], y[:, number])
            total = total + precision * loss + self.log_vars[number]
        return total


@entry(Classification)
def mean_reciprocal_rank_of_each_sample(self: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = self(x)
    rank = (scores >= scores.gather(1, y[:, None])).sum(1)
    self.log("mrr", (1.0 / rank).mean())
    return F.cross_entropy(scores, y)
