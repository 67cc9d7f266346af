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
    IGNORED,
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
criterion(Regression, "L1Loss", nn.L1Loss)
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
criterion(Segmentation, "CrossEntropyLossOfPixels", nn.CrossEntropyLoss)
criterion(
    Segmentation,
    "CrossEntropyLossOfWeightedPixels",
    lambda: nn.CrossEntropyLoss(torch.tensor([0.3, 1.0, 2.0])),
)
criterion(Binary, "BCEWithLogitsLoss", nn.BCEWithLogitsLoss)
criterion(
    Binary, "BCEWithLogitsLossWeighted", lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0))
)
criterion(Labels, "BCEWithLogitsLossOfLabels", nn.BCEWithLogitsLoss)
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
def nll_loss_with_weights(self: Any, x: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([1.0, 2.0, 0.5, 1.5])
    return F.nll_loss(F.log_softmax(self(x), 1), y, weight=weight)


@entry(Classification)
def kl_div_batchmean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    target = (F.one_hot(y, CLASSES) * 2.0).softmax(-1)
    return nn.KLDivLoss(reduction="batchmean")(self(x).log_softmax(-1), target)


@entry(Classification)
def kl_div_log_target(self: Any, x: Tensor, y: Tensor) -> Tensor:
    target = (F.one_hot(y, CLASSES) * 2.0).log_softmax(-1)
    return F.kl_div(self(x).log_softmax(-1), target, log_target=True, reduction="batchmean")


@entry(Scalar)
def gaussian_nll_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.GaussianNLLLoss()(self(x), y, torch.full_like(y, 0.5))


@entry(Regression)
def gaussian_nll_of_a_head(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.gaussian_nll_loss(out[:, :1], y[:, :1], F.softplus(out[:, 1:2]))


@entry(Embedding)
def cosine_embedding_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return nn.CosineEmbeddingLoss(margin=0.2)(z, x[:, :5], torch.where(y == 0, 1, -1))


@entry(Regression)
def triplet_margin_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.TripletMarginLoss(margin=1.0, p=2)(self(x), y, x[:, :3])


@entry(Regression)
def triplet_margin_with_distance_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    distance = nn.PairwiseDistance()
    return nn.TripletMarginWithDistanceLoss(distance_function=distance)(self(x), y, x[:, :3])


@entry(Regression)
def margin_ranking_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return nn.MarginRankingLoss(margin=0.1)(out[:, 0], out[:, 1], (y[:, 0] - y[:, 1]).sign())


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
def ctc_loss_summed(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logp = self(batch["words"]).log_softmax(-1).transpose(0, 1)
    lengths = batch["lengths"]
    sizes = (lengths > 2).long() + 1
    targets = batch["words"][:, :2].clamp(min=1)
    return F.ctc_loss(logp, targets, lengths, sizes, reduction="sum", zero_infinity=True)


@entry(Tagger)
def cross_entropy_of_tokens_flattened(self: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = self(batch["words"])
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1))


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
def mean_over_sentences(self: Any, batch: dict[str, Tensor]) -> Tensor:
    labels, mask = batch["labels"], batch["mask"]
    losses = F.cross_entropy(
        self(batch["words"]).mT, labels, ignore_index=IGNORED, reduction="none"
    )
    return (losses.sum(1) / mask.sum(1)).mean()


@entry(Tagger)
def nonzero_labels(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(self(batch["words"]).mT, batch["labels"], reduction="none")
    return losses.sum() / (batch["labels"] != IGNORED).sum()


@entry(Tagger)
def weights_of_tokens(self: Any, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(self(batch["words"]).mT, batch["words"], reduction="none")
    weights = 1 / (1 + torch.arange(5.0))
    weights = weights * batch["mask"]
    return (losses * weights).sum() / weights.sum()


@entry(Classification)
def cross_entropy_of_probabilities(self: Any, x: Tensor, y: Tensor) -> Tensor:
    target = 0.8 * F.one_hot(y, CLASSES).float() + 0.05
    return F.cross_entropy(self(x), target)


@entry(Classification)
def label_smoothing_by_hand(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logp = F.log_softmax(self(x), dim=-1)
    nll = -logp.gather(dim=-1, index=y.unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * logp.mean(dim=-1)).mean()


@entry(Classification)
def temperature_scaled(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(self(x) / 0.7, y)


@entry(Classification)
def accumulated_over_classes(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits, hot = self(x), F.one_hot(y, CLASSES).float()
    loss = torch.zeros(())
    for number in range(CLASSES):
        loss = loss + F.binary_cross_entropy_with_logits(logits[:, number], hot[:, number])
    return loss / CLASSES
