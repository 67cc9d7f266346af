"""Every loss of torch.nn, as its documentation uses it, and the usual ways to call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import (
    CLASSES,
    Binary,
    Classification,
    Embedding,
    Labels,
    Regression,
    Scalar,
    Segmentation,
    Tagger,
)


def criterion(base: type, name: str, make: Callable[[], nn.Module]) -> None:
    """Enter a module whose loss is a layer of torch."""

    def __init__(self: Any) -> None:
        base.__init__(self)
        self.criterion = make()

    def loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self(x), y)

    entry()(type(name, (base,), {"__init__": __init__, "loss": loss, "__module__": __name__}))


criterion(Regression, "MSELoss", nn.MSELoss)
criterion(Regression, "MSELossSum", lambda: nn.MSELoss(reduction="sum"))
criterion(Regression, "SmoothL1Loss", lambda: nn.SmoothL1Loss(beta=0.5))
criterion(Regression, "HuberLoss", lambda: nn.HuberLoss(delta=0.7))
criterion(Regression, "PoissonNLLLoss", nn.PoissonNLLLoss)
criterion(Classification, "CrossEntropyLoss", nn.CrossEntropyLoss)
criterion(Classification, "CrossEntropyLossSum", lambda: nn.CrossEntropyLoss(reduction="sum"))
criterion(
    Classification,
    "CrossEntropyLossWeighted",
    lambda: nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 3.0])),
)
criterion(
    Classification,
    "CrossEntropyLossSmoothed",
    lambda: nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 3.0]), label_smoothing=0.1),
)
criterion(Classification, "CrossEntropyLossIgnoring", lambda: nn.CrossEntropyLoss(ignore_index=0))
criterion(Classification, "MultiMarginLoss", nn.MultiMarginLoss)
criterion(
    Segmentation,
    "CrossEntropyLossOfWeightedPixels",
    lambda: nn.CrossEntropyLoss(torch.tensor([0.3, 1.0, 2.0])),
)
criterion(
    Binary, "BCEWithLogitsLossWeighted", lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
)
criterion(Labels, "MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss)


@entry(Binary)
def bce_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.BCELoss()(torch.sigmoid(self(x)), y)


@entry(Binary)
def soft_margin_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.SoftMarginLoss()(self(x), 2 * y - 1)


@entry(Binary)
def hinge_embedding_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.HingeEmbeddingLoss()(self(x).abs(), 2 * y - 1)


@entry(Classification)
def nll_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.NLLLoss()(torch.log_softmax(self(x), dim=1), y)


@entry(Classification)
def kl_div_batchmean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    target = (F.one_hot(y, CLASSES) * 2.0).softmax(-1)
    return nn.KLDivLoss(reduction="batchmean")(self(x).log_softmax(-1), target)


@entry(Scalar)
def gaussian_nll_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.GaussianNLLLoss()(self(x), y, torch.full_like(y, 0.5))


@entry(Embedding)
def cosine_embedding_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return nn.CosineEmbeddingLoss(margin=0.2)(z, x[:, :5], torch.where(y == 0, 1, -1))


@entry(Regression)
def triplet_margin_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.TripletMarginLoss(margin=1.0, p=2)(self(x), y, x[:, :3])


@entry(Classification)
def multi_label_margin_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    target = torch.full((len(y), CLASSES), -1)
    target[:, 0] = y
    return nn.MultiLabelMarginLoss()(self(x), target)


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
def cross_entropy_with_padding_index(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = self(batch["words"])
    words = batch["words"]
    return F.cross_entropy(logits.flatten(0, 1), words.flatten(), ignore_index=0)


@entry(Tagger)
def shifted_language_modelling(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels = self(batch["words"])[:, :-1], batch["words"][:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@entry(Tagger)
def masked_by_a_product(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels, mask = self(batch["words"]), batch["labels"], batch["mask"].float()
    losses = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()


@entry(Tagger)
def divided_by_the_count_before_the_sum(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, labels, mask = self(batch["words"]), batch["labels"], batch["mask"].float()
    losses = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return (losses * mask / mask.sum()).sum()


@entry(Tagger)
def masked_by_an_index(self: Any, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["mask"]
    return F.cross_entropy(self(batch["words"])[mask], batch["labels"][mask])


@entry(Tagger)
def masked_select(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(self(batch["words"]).mT, batch["words"], reduction="none")
    return torch.masked_select(losses, batch["mask"]).mean()


@entry(Tagger)
def weights_of_tokens(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(self(batch["words"]).mT, batch["words"], reduction="none")
    weights = 1 / (1 + torch.arange(5.0))
    weights = weights * batch["mask"]
    return (losses * weights).sum() / weights.sum()


@entry(Classification)
def accumulated_over_classes(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, hot = self(x), F.one_hot(y, CLASSES).float()
    loss = torch.zeros(())
    for number in range(CLASSES):
        loss = loss + F.binary_cross_entropy_with_logits(logits[:, number], hot[:, number])
    return loss / CLASSES
