"""Numbers taken out of torch: what a step computes and decides with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression, Scalar


@entry(Regression, equal=True)
def loss_over_its_number(self: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(self(x), y)
    return loss / loss.item()


@entry(Regression)
def balances_by_numbers(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    rec, kl = F.mse_loss(out, y), out.pow(2).mean()
    return rec + rec.item() / kl.item() * kl


@entry(Regression)
def balances_by_detached_norms(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    first, second = F.mse_loss(out, y), F.l1_loss(out, y)
    scale = float(first.detach()) / (float(second.detach()) + 1e-8)
    return first + scale * second


@entry(Regression)
def decides_by_the_loss(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    loss = F.mse_loss(out, y)
    if loss.item() < 2.6:
        return loss
    return F.l1_loss(out, y)


@entry(Regression)
def decides_by_a_tensor(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    loss = F.mse_loss(out, y)
    return loss if loss > 2.8 else 0.5 * loss


@entry(Scalar)
def python_math(self: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(self(x), y)
    return loss * math.exp(-loss.item())


@entry(Scalar)
def numpy_weights(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y) ** 2
    weights = errors.detach().numpy()
    weights = weights / weights.sum()
    return (torch.from_numpy(weights) * errors).sum()


@entry(Scalar)
def tolist_threshold(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y).abs()
    middle = sorted(errors.tolist())[len(errors) // 2]
    return (errors * (errors > middle)).mean()


@entry(Scalar)
def scipy_like_rank_weights(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y).abs()
    ranks = np.argsort(np.argsort(errors.detach().numpy()))
    return (errors * torch.from_numpy(ranks).float()).mean()


@entry(Classification, equal=True)
def difficulty_by_accuracy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    accuracy = (logits.argmax(-1) == y).float().mean().item()
    return F.cross_entropy(logits, y) * (1 + accuracy)


@entry(Classification)
def smooths_by_accuracy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    accuracy = float((logits.argmax(-1) == y).sum()) / len(y)
    return F.cross_entropy(logits, y, label_smoothing=0.5 * accuracy)


@entry(Regression)
def skips_bad_batches(self: Any, batch: Any, batch_idx: int) -> Any:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    return None if loss.item() > 3.2 else loss


@entry(Regression, equal=True)
def keeps_the_first_loss(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Losses relative to the first one, as in GradNorm."""
    x, y = batch
    loss = F.mse_loss(self(x), y)
    if not hasattr(self, "first"):
        self.first = loss.item()
    return loss / self.first


@entry(Regression)
def moving_average_of_the_loss(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.average = 0.9 * getattr(self, "average", 1.0) + 0.1 * loss.item()
    return loss / self.average


@entry(Regression)
def clips_the_loss_by_its_history(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    history = self.__dict__.setdefault("history", [])
    history.append(loss.item())
    limit = 1.1 * sum(history) / len(history)
    return loss.clamp(max=limit)
