"""Autoencoders, flows, diffusion, augmentation; of those that draw only words are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import FEATURES, Images, Module, Regression, Sequences


class Autoencoder(Regression):
    outputs = FEATURES


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


@entry(Autoencoder)
def reconstructs(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), x)


@entry(Autoencoder)
def reconstructs_by_sums_of_pixels(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), x, reduction="none").sum(dim=1).mean(dim=0)


@entry(Autoencoder)
def sparse_autoencoder(self: Any, x: Tensor, y: Tensor) -> Tensor:
    out = self(x)
    return F.mse_loss(out, x) + 1e-2 * out.abs().sum(-1).mean()


@entry(Autoencoder)
def masked_autoencoder(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mask = (torch.arange(FEATURES) % 3 == 0).float()
    error = (self(x * (1 - mask)) - x) ** 2
    return (error * mask).sum() / (mask.sum() * len(x))


@entry(Autoencoder)
def denoising_autoencoder(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x + 0.1 * torch.randn_like(x)), x)


@entry(Autoencoder)
def masks_by_random_numbers(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.rand(x.shape) < 0.5
    return ((self(x * ~mask) - x) ** 2 * mask).sum() / mask.sum()


@entry(Autoencoder)
def masks_by_an_argsort_of_noise(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """As masked autoencoders choose patches, for each sample."""
    order = torch.rand(len(x), FEATURES).argsort(dim=1)
    mask = torch.zeros_like(x).scatter(1, order[:, :3], 1.0)
    return ((self(x * (1 - mask)) - x) ** 2 * mask).sum(1).mean() / 3


@entry(Variational)
def variational(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z, mu, logvar = self.encoded(x)
    kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
    return F.mse_loss(self.decoder(z), x) + 0.01 * kld


@entry(Variational)
def variational_of_sums(self: Any, x: Tensor, y: Tensor) -> Tensor:
    z, mu, logvar = self.encoded(x)
    rec = F.mse_loss(self.decoder(z), x, reduction="sum")
    return rec - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


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
def variational_without_noise(self: Any, x: Tensor, y: Tensor) -> Tensor:
    mu, logvar = self.encoder(x).chunk(2, dim=1)
    kld = -0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1).mean()
    return F.mse_loss(self.decoder(mu), x) + 0.01 * kld


@entry(Variational)
def categorical_by_gumbel(self: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = self.encoder(x)[:, :4]
    z = F.gumbel_softmax(logits, tau=0.7)
    p = logits.softmax(-1)
    kld = (p * (p.clamp(min=1e-8) * 4).log()).sum(-1).mean()
    return F.mse_loss(self.decoder(z), x) + 0.1 * kld


@entry(Variational)
def vector_quantization(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """With a straight-through gradient and fixed codes."""
    z = self.encoder(x)[:, :4]
    codes = torch.eye(4)
    chosen = codes[torch.cdist(z, codes).argmin(1)]
    commitment = F.mse_loss(z, chosen)
    z = z + (chosen - z).detach()
    return F.mse_loss(self.decoder(z), x) + 0.25 * commitment


@entry()
class CodebookAsAnEmbedding(Variational):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(5, 4)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.encoder(x)[:, :4]
        chosen = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        loss = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(chosen.detach(), z)
        return loss + F.mse_loss(self.decoder(z + (chosen - z).detach()), x)


class Coupling(nn.Module):
    """An affine coupling; passes the data and the logarithm of the determinant on."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, half = flip, FEATURES // 2
        self.net = nn.Sequential(nn.Linear(half, 12), nn.Tanh(), nn.Linear(12, 2 * half))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, logdet = state
        a, b = x.chunk(2, 1)
        if self.flip:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, 1)
        b = b * scale.tanh().exp() + shift
        x = torch.cat([b, a] if self.flip else [a, b], 1)
        return x, logdet + scale.tanh().sum(1)


@entry()
class Flow(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Coupling(bool(n % 2)) for n in range(4)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logdet = self.model((x, torch.zeros(len(x))))
        prior = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
        return -(prior + logdet).mean()


class Diffusion(Module):
    """Predicts noise that was added to the data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))
        self.times = nn.Embedding(10, FEATURES)
        self.model = nn.Sequential(nn.Linear(FEATURES, 16), nn.SiLU(), nn.Linear(16, FEATURES))

    @classmethod
    def dataset(cls, seed: int) -> Any:
        return Regression.dataset(seed)


@entry(Diffusion)
def denoising_diffusion(self: Any, x: Tensor, y: Tensor) -> Tensor:
    t = torch.randint(0, 10, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    a = self.alphas[t][:, None]
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    return F.mse_loss(self.model(noisy + self.times(t)), noise)


@entry(Diffusion)
def flow_matching(self: Any, x: Tensor, y: Tensor) -> Tensor:
    t, start = torch.rand(len(x), 1), torch.randn_like(x)
    return F.mse_loss(self.model((1 - t) * start + t * x), x - start)


@entry(Diffusion)
def diffusion_by_noise_of_a_generator(self: Any, x: Tensor, y: Tensor) -> Tensor:
    noise = torch.empty_like(x).normal_()
    t = torch.empty(len(x), dtype=torch.long).random_(0, 10)
    return (self.model(x + noise) + self.times(t) - noise).abs().mean()


@entry(Diffusion)
def diffusion_with_times_of_the_data(self: Any, x: Tensor, y: Tensor) -> Tensor:
    t = (x[:, 0].abs() * 4).long().clamp(max=9)
    noise = torch.sin(100 * x)
    a = self.alphas[t][:, None]
    return F.mse_loss(self.model(a.sqrt() * x + (1 - a).sqrt() * noise + self.times(t)), noise)


@entry(Images)
def augments_each_image(self: Any, x: Tensor, y: Tensor) -> Tensor:
    flips = torch.rand(len(x), 1, 1, 1) < 0.5
    return F.cross_entropy(self(torch.where(flips, x.flip(-1), x)), y)


@entry(Images)
def augments_all_images_alike(self: Any, x: Tensor, y: Tensor) -> Tensor:
    if torch.rand(()) < 0.5:
        x = x.flip(-1)
    return F.cross_entropy(self(x), y)


@entry(Regression)
def label_noise(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x), y + 0.05 * torch.randn(y.shape))


@entry(Regression)
def dropout_as_on_a_gpu(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(torch.native_dropout(x, 0.2, self.training)[0]), y)


@entry(Regression)
def dropout_by_function(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(F.dropout(x, 0.2, self.training)), y)


@entry(Regression)
def bernoulli_mask(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(self(x * torch.bernoulli(torch.full_like(x, 0.9))), y)


@entry(Sequences)
def autoregression_with_a_shift(self: Any, x: Tensor, y: Tensor) -> Tensor:
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    return F.mse_loss(self(shifted), x)
