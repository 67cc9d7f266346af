"""Logged values that are functions of means and sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Classification, Regression, Scalar


@entry(Classification, equal=True)
def logs_perplexity(self: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(self(x), y)
    self.log("ppl", loss.exp())
    return loss


@entry(Regression, hook="validation_step", equal=True)
def validates_root_mean_square(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_rmse", F.mse_loss(self(x), y).sqrt(), prog_bar=True)


@entry(Binary, equal=True)
def logs_f1_of_counts(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    loss = F.binary_cross_entropy_with_logits(logits, y)
    guess = (logits > -0.2).float()
    hit, false, missed = (guess * y).sum(), (guess * (1 - y)).sum(), ((1 - guess) * y).sum()
    self.log("f1", 2 * hit / (2 * hit + false + missed + 1e-8))
    return loss


@entry(Classification, equal=True)
def logs_the_number_of_hits(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    self.log("hits", (logits.argmax(-1) == y).sum().float(), reduce_fx="sum", on_epoch=True)
    return F.cross_entropy(logits, y)


@entry(Classification)
def logs_error_of_numpy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    p = logits.detach().softmax(-1).numpy()
    self.log("spread", float(np.std(p[:, 0])))
    return F.cross_entropy(logits, y)


@entry(Scalar)
def logs_correlation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    self.log("r", torch.corrcoef(torch.stack([p.detach(), y]))[0, 1])
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_the_largest_error(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    self.log("worst", (p - y).abs().max())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    self.log("absolute", (p - y).abs().sum())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_the_number_of_samples(self: Any, x: Tensor, y: Tensor) -> Tensor:
    self.log("samples", torch.tensor(float(len(x))))
    return F.mse_loss(self(x), y)


@entry(Scalar)
def logs_an_index(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    self.log("argmax", p.argmax().float())
    return F.mse_loss(p, y)


@entry(Regression, equal=True)
def logs_a_dict_of_everything(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    mse, mae = F.mse_loss(out, y), F.l1_loss(out, y)
    self.log_dict({"mse": mse, "mae": mae, "rmse": mse.sqrt(), "ratio": mae / mse})
    return mse
