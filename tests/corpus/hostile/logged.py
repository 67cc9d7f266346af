"""Logged values that are functions of means and sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Binary, Classification, Regression, Scalar, Tagger


@entry(Classification, equal=True)
def logs_perplexity(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(self(x), y)
    self.log("ppl", loss.exp())
    return loss


@entry(Tagger, equal=True)
def logs_perplexity_of_tokens(self: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = F.cross_entropy(self(batch["words"]).mT, batch["labels"])
    self.log("train_ppl", torch.exp(loss), on_step=True, on_epoch=True, prog_bar=True,
             batch_size=8)  # fmt: skip
    return loss


@entry(Tagger, hook="validation_step", equal=True)
def validates_perplexity(self: Any, batch: Any, batch_idx: int) -> None:
    loss = F.cross_entropy(self(batch["words"]).mT, batch["labels"])
    self.log_dict({"val_loss": loss, "val_ppl": loss.exp()}, batch_size=8)


@entry(Classification)
def logs_perplexity_by_math(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(self(x), y)
    self.log("ppl", math.exp(loss.item()))
    return loss


@entry(Classification, equal=True)
def logs_bits(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(self(x), y)
    self.log("bits", loss.detach() / math.log(2))
    return loss


@entry(Regression, equal=True)
def logs_root_mean_square(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("rmse", torch.sqrt(loss))
    return loss


@entry(Regression, equal=True)
def logs_root_as_power(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("rmse", loss**0.5)
    return loss


@entry(Regression, hook="validation_step", equal=True)
def validates_root_mean_square(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    self.log("val_rmse", F.mse_loss(self(x), y).sqrt(), prog_bar=True)


@entry(Regression, equal=True)
def logs_signal_to_noise(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("psnr", 10 * torch.log10(4 / loss))
    return loss


@entry(Regression, equal=True)
def logs_loss_times_samples(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("sum", loss * len(x), on_step=True, on_epoch=True, reduce_fx="sum")
    return loss


@entry(Regression, equal=True)
def logs_detached_loss_times_size(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("total", loss.detach() * x.shape[0])
    return loss


@entry(Binary, equal=True)
def logs_f1_of_counts(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    loss = F.binary_cross_entropy_with_logits(logits, y)
    guess = (logits > -0.2).float()
    hit, false, missed = (guess * y).sum(), (guess * (1 - y)).sum(), ((1 - guess) * y).sum()
    self.log("f1", 2 * hit / (2 * hit + false + missed + 1e-8))
    return loss


@entry(Binary, equal=True)
def logs_precision_and_recall(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    guess, y_bool = logits > -0.2, y.bool()
    hit = (guess & y_bool).sum().float()
    self.log("precision", hit / guess.sum().clamp(min=1))
    self.log("recall", hit / y_bool.sum().clamp(min=1))
    return F.binary_cross_entropy_with_logits(logits, y)


@entry(Classification, equal=True)
def logs_the_number_of_hits(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    self.log("hits", (logits.argmax(-1) == y).sum().float(), reduce_fx="sum", on_epoch=True)
    return F.cross_entropy(logits, y)


@entry(Classification, equal=True)
def logs_accuracy_as_number(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    self.log("acc", (logits.argmax(-1) == y).float().mean().item())
    return F.cross_entropy(logits, y)


@entry(Classification, equal=True)
def logs_hits_as_number(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    self.log("hits", float((logits.argmax(-1) == y).sum().item()))
    return F.cross_entropy(logits, y)


@entry(Classification)
def logs_error_of_numpy(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    logits = self(x)
    p = logits.detach().softmax(-1).numpy()
    self.log("spread", float(np.std(p[:, 0])))
    return F.cross_entropy(logits, y)


@entry(Scalar)
def logs_correlation(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("r", torch.corrcoef(torch.stack([p.detach(), y]))[0, 1])
    return F.mse_loss(p, y)


@entry(Scalar)
def logs_r2_by_hand(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("r2", 1 - (p - y).pow(2).sum() / (y - y.mean()).pow(2).sum())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_the_largest_error(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("worst", (p - y).abs().max())
    return F.mse_loss(p, y)


@entry(Scalar)
def logs_the_median(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("median", (p - y).abs().median())
    return F.mse_loss(p, y)


@entry(Scalar)
def logs_the_spread(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("spread", p.detach().std())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_sums(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("absolute", (p - y).abs().sum())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_root_of_a_sum(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("norm", (p - y).pow(2).sum().sqrt())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_a_ratio_of_sums(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("wape", (p - y).abs().sum() / y.abs().sum())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_a_ratio_of_means(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("nmse", F.mse_loss(p, y) / y.pow(2).mean())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_the_number_of_samples(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    self.log("samples", torch.tensor(float(len(x))))
    return F.mse_loss(self(x), y)


@entry(Scalar, equal=True)
def logs_the_length_of_the_batch(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    self.log("samples", len(x), reduce_fx="sum")
    return F.mse_loss(self(x), y)


@entry(Scalar)
def logs_the_first_prediction(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("first", p[0])
    return F.mse_loss(p, y)


@entry(Scalar)
def logs_an_index(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    p = self(x)
    self.log("argmax", p.argmax().float())
    return F.mse_loss(p, y)


@entry(Scalar, equal=True)
def logs_the_learning_rate(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
    return F.mse_loss(self(x), y)


@entry(Scalar, equal=True)
def logs_an_exponential_moving_loss_of_the_trainer(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
    self.log("sigmoid", torch.sigmoid(loss))
    return loss


@entry(Classification, equal=True)
def logs_entropy_of_the_mean(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """Codebook perplexity of vector quantization: a function of a mean that is a vector."""
    x, y = batch
    logits = self(x)
    mean = logits.softmax(-1).mean(0)
    self.log("usage", torch.exp(-(mean * (mean + 1e-10).log()).sum()))
    return F.cross_entropy(logits, y)


@entry(Classification, hook="validation_step", equal=True)
def validates_a_product_of_means(self: Any, batch: Any, batch_idx: int) -> None:
    x, y = batch
    logits = self(x)
    loss, acc = F.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()
    self.log("val_score", acc * torch.exp(-loss))


@entry(Regression, equal=True)
def logs_a_dict_of_everything(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    out = self(x)
    mse, mae = F.mse_loss(out, y), F.l1_loss(out, y)
    self.log_dict({"mse": mse, "mae": mae, "rmse": mse.sqrt(), "ratio": mae / mse})
    return mse
