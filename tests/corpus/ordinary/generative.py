"""Autoencoders and diffusion, which draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, Module, Regression


class Variational(Regression):
    """Encodes into a mean and a logarithm of a variance, on the way through the layers."""

    pipeline: Any = ("encoder", "decoder")

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, FEATURES))

    def encoded(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return z, mu, logvar


class Autoencoder(Regression):
    outputs = FEATURES


@entry(Autoencoder)
def masks_by_random_numbers(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.rand(x.shape) < 0.5
    return ((self(x * ~mask) - x) ** 2 * mask).sum() / mask.sum()


@entry(Variational)
def variational(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z, mu, logvar = self.encoded(x)
    kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
    return F.mse_loss(self.decoder(z), x) + 0.01 * kld


@entry(Variational)
def variational_with_logs(self: Any, batch: Any, batch_idx: int) -> Tensor:
    """As the classic module of Lightning's examples does it."""
    x, _ = batch
    mu, logvar = self.encoder(x).chunk(2, dim=1)
    std = torch.exp(logvar / 2)
    p = torch.distributions.Normal(torch.zeros_like(mu), torch.ones_like(std))
    q = torch.distributions.Normal(mu, std)
    z = q.rsample()
    kl = (q.log_prob(z) - p.log_prob(z)).sum(-1).mean()
    rec = F.mse_loss(self.decoder(z), x, reduction="mean")
    loss = kl * 0.1 + rec
    self.log_dict({"recon_loss": rec, "kl": kl, "elbo": loss}, on_step=True, on_epoch=True)
    return loss


@entry(Variational)
def categorical_by_gumbel(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self.encoder(x)[:, :4]
    z = F.gumbel_softmax(logits, tau=0.7)
    p = logits.softmax(-1)
    kld = (p * (p.clamp(min=1e-8) * 4).log()).sum(-1).mean()
    return F.mse_loss(self.decoder(z), x) + 0.1 * kld


class Diffusion(Module):
    """Predicts noise that was added to the data."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, FEATURES)
        self.model = nn.Sequential(nn.Linear(FEATURES, 16), nn.SiLU(), nn.Linear(16, FEATURES))

    @classmethod
    def dataset(cls, seed: int) -> Any:
        return Regression.dataset(seed)


@entry(Diffusion)
def diffusion_by_noise_of_a_generator(self: Any, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.empty_like(x).normal_()
    t = torch.empty(len(x), dtype=torch.long).random_(0, 10)
    return (self.model(x + noise) + self.times(t) - noise).abs().mean()
