"""Statistics over the samples of a batch, in the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Embedding, Images, Regression, Scalar


@entry(Regression)
def standardizes_the_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean(0)) / x.std(0)
    return F.mse_loss(self(x), y)


@entry(Regression)
def standardizes_by_all_values(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.mean()) / (x.std() + 1e-6)
    return F.mse_loss(self(x), y)


@entry(Regression)
def standardizes_the_output(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    out = (out - out.mean(0, keepdim=True)) / (out.std(0, keepdim=True) + 1e-5)
    return F.mse_loss(out, y)


@entry(Regression)
def scales_the_input_by_its_maximum(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x / x.abs().max()), y)


@entry(Images)
def scales_images_to_the_unit_interval(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = (x - x.min()) / (x.max() - x.min())
    return F.cross_entropy(self(x), y)


@entry(Regression)
def scales_by_aminmax(self: Any, x: Tensor, y: Tensor) -> Tensor:
    low, high = torch.aminmax(x, dim=0)
    return F.mse_loss(self((x - low) / (high - low)), y)


@entry(Regression)
def normalizes_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(F.normalize(self(x), dim=0), F.normalize(y, dim=0))


@entry(Regression)
def cosine_similarity_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(self(x), y, dim=0).mean()


@entry(Regression)
def normalizes_a_mean_by_var_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    var, mean = torch.var_mean(out, dim=0, unbiased=False)
    return F.mse_loss((out - mean) * torch.rsqrt(var + 1e-5), y)


@entry(Regression)
def normalizes_a_mean_by_std_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    std, mean = torch.std_mean(y, dim=0)
    return F.mse_loss(self(x), (y - mean) / std)


@entry(Regression)
def divides_by_the_variance_of_targets(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y) / y.var()


@entry(Embedding)
def covariance_of_outputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    c = torch.cov(z.T)
    off = c - torch.diag(torch.diag(c))
    return F.cross_entropy(z, y) + 0.1 * off.pow(2).sum()


@entry(Embedding)
def correlation_of_outputs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    return F.cross_entropy(z, y) + torch.corrcoef(z.T).triu(1).abs().mean()


@entry(Embedding)
def covariance_by_hand(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    z = z - z.mean(dim=0)
    cov = (z.T @ z) / (len(z) - 1)
    return F.cross_entropy(z, y) + cov.fill_diagonal_(0).pow(2).sum() / z.size(1)


@entry(Embedding)
def variance_hinge_as_in_vicreg(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z = self(x)
    std = torch.sqrt(z.var(dim=0) + 1e-4)
    return F.cross_entropy(z, y) + torch.mean(F.relu(1 - std))


@entry(Scalar)
def pearson_correlation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    p, y = p - p.mean(), y - y.mean()
    return 1 - (p * y).sum() / (p.norm() * y.norm() + 1e-8)


@entry(Scalar)
def concordance_correlation(self: Any, x: Tensor, y: Tensor) -> Tensor:
    p = self(x)
    covariance = ((p - p.mean()) * (y - y.mean())).mean()
    gap = (p.mean() - y.mean()) ** 2
    return 1 - 2 * covariance / (p.var(unbiased=False) + y.var(unbiased=False) + gap)


@entry(Scalar)
def explained_variance(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((self(x) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()


@entry(Scalar)
def quantile_of_errors(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.quantile((self(x) - y).abs(), 0.7)


@entry(Scalar)
def median_of_errors(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x) - y).abs().median()


@entry(Scalar)
def clips_errors_at_a_quantile(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y).abs()
    limit = torch.quantile(errors.detach(), 0.5)
    return torch.where(errors < limit, errors, limit + 0.1 * (errors - limit)).mean()


@entry(Scalar)
def threshold_of_berhu(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The reversed Huber loss: its threshold is a fifth of the largest error."""
    error = (self(x) - y).abs()
    c = 0.2 * error.max().detach()
    return torch.where(error <= c, error, (error**2 + c**2) / (2 * c)).mean()


@entry(Classification)
def class_weights_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=4).float()
    weights = counts.sum() / (counts + 1)
    return F.cross_entropy(self(x), y, weight=weights)


@entry(Classification, equal=True)
def balance_of_predictions(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    mean = logits.softmax(-1).mean(0)
    return F.cross_entropy(logits, y) + (mean * mean.log()).sum()


@entry(Classification)
def softmax_over_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self(x)
    attention = torch.softmax(logits.max(-1).values, dim=0)
    return (attention * F.cross_entropy(logits, y, reduction="none")).sum()


@entry(Regression)
def largest_error_of_the_batch(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return (self(x) - y).pow(2).mean(1).max()


@entry(Classification)
def hardest_half(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Online hard example mining."""
    losses = F.cross_entropy(self(x), y, reduction="none")
    return losses.topk(len(losses) // 2).values.mean()


@entry(Classification)
def hardest_by_a_threshold_of_their_mean(self: Any, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(self(x), y, reduction="none")
    return losses[losses > losses.mean()].mean()


@entry(Scalar)
def log_of_the_mean_of_exponentials(self: Any, x: Tensor, y: Tensor) -> Tensor:
    errors = (self(x) - y) ** 2
    return torch.logsumexp(errors, 0)


@entry(Regression)
def centres_the_input_in_place(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone()
    x.sub_(x.mean(dim=0)).div_(x.std(dim=0).clamp_min(1e-6))
    return F.mse_loss(self(x), y)


@entry(Regression)
def statistics_in_numpy(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mean = torch.from_numpy(x.numpy().mean(axis=0))
    return F.mse_loss(self(x - mean), y)


@entry(Regression)
def statistics_as_python_numbers(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self((x - x.mean().item()) / x.std().item()), y)


@entry(Regression)
def batch_norm_by_function(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(F.batch_norm(x, None, None, training=True)), y)
