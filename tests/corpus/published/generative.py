"""Generative modules in the shape of notebooks and collections."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.published.vision import CHANNELS, DOUBLE, NORMS, SIDE, Images

PIXELS = CHANNELS * SIDE * SIDE


@entry(trainer=DOUBLE)
class UvAAutoencoder(Images):
    """The notebook's encoder and decoder, each a module with a `net`."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(CHANNELS, 6, 3, padding=1, stride=2),
                nn.GELU(),
                nn.Conv2d(6, 12, 3, padding=1, stride=2),
                nn.GELU(),
                nn.Flatten(),
                nn.Linear(48, 8),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Sequential(nn.Linear(8, 48), nn.GELU())
            self.net = nn.Sequential(
                nn.ConvTranspose2d(12, 6, 3, output_padding=1, padding=1, stride=2),
                nn.GELU(),
                nn.ConvTranspose2d(6, CHANNELS, 3, output_padding=1, padding=1, stride=2),
                nn.Tanh(),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return self.net(x.reshape(x.shape[0], -1, 2, 2))

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Encoder(), self.Decoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def _get_reconstruction_loss(self, batch: Any) -> Tensor:
        x, _ = batch
        loss = F.mse_loss(x, self.forward(x), reduction="none")
        return loss.sum(dim=[1, 2, 3]).mean(dim=[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.2, 20, 5e-5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._get_reconstruction_loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._get_reconstruction_loss(batch))


class VanillaVAE(nn.Module):
    """PyTorch-VAE's network: blocks in Sequentials, the loss as a method."""

    def __init__(self, norm: bool) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, layer: type, **more: int) -> nn.Sequential:
            convolution = layer(inputs, outputs, kernel_size=3, stride=2, padding=1, **more)
            second = nn.BatchNorm2d(outputs) if norm else nn.Identity()
            return nn.Sequential(convolution, second, nn.LeakyReLU())

        self.encoder = nn.Sequential(block(CHANNELS, 6, nn.Conv2d), block(6, 12, nn.Conv2d))
        self.fc_mu, self.fc_var = nn.Linear(48, 4), nn.Linear(48, 4)
        self.decoder_input = nn.Linear(4, 48)
        self.decoder = nn.Sequential(
            block(12, 6, nn.ConvTranspose2d, output_padding=1),
            block(6, 6, nn.ConvTranspose2d, output_padding=1),
        )
        self.final_layer = nn.Sequential(nn.Conv2d(6, CHANNELS, 3, padding=1), nn.Tanh())
        self.num_iter = 0

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        return torch.randn_like(logvar) * torch.exp(0.5 * logvar) + mu

    def forward(self, x: Tensor) -> list[Tensor]:
        result = torch.flatten(self.encoder(x), start_dim=1)
        mu, log_var = self.fc_mu(result), self.fc_var(result)
        z = self.reparameterize(mu, log_var)
        decoded = self.decoder(self.decoder_input(z).view(-1, 12, 2, 2))
        return [self.final_layer(decoded), x, mu, log_var]

    def loss_function(self, *args: Tensor, M_N: float) -> dict[str, Tensor]:
        recons, x, mu, log_var = args
        recons_loss = F.mse_loss(recons, x)
        kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
        loss = recons_loss + M_N * kld
        return {
            "loss": loss,
            "Reconstruction_Loss": recons_loss.detach(),
            "KLD": -kld.detach(),
        }


class BetaVAE(VanillaVAE):
    """Its capacity grows with a counter of the network's calls."""

    def loss_function(self, *args: Tensor, M_N: float) -> dict[str, Tensor]:
        self.num_iter += 1
        recons, x, mu, log_var = args
        kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
        capacity = torch.clamp(torch.tensor(25.0) / 1e2 * self.num_iter, 0, 25)
        recons_loss = F.mse_loss(recons, x)
        loss = recons_loss + 10 * M_N * (kld - capacity).abs()
        return {"loss": loss, "Reconstruction_Loss": recons_loss, "KLD": kld}


class MeanVAE(VanillaVAE):
    """Without noise, so that its numbers can be compared."""

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        return mu


class VAEExperiment(Images):
    """PyTorch-VAE's wrapper, which logs all parts of the loss as numbers."""

    network: type[VanillaVAE] = VanillaVAE
    norm = False

    def __init__(self) -> None:
        super().__init__()
        self.model = self.network(self.norm)
        self.curr_device = None

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.model(x, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real_img, _ = batch
        self.curr_device = real_img.device
        results = self.forward(real_img)
        train_loss = self.model.loss_function(*results, M_N=0.025)
        self.log_dict({key: val.item() for key, val in train_loss.items()}, sync_dist=True)
        return train_loss["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        results = self.forward(batch[0])
        val_loss = self.model.loss_function(*results, M_N=1.0)
        self.log_dict({f"val_{key}": val.item() for key, val in val_loss.items()}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)]


@entry(trainer=DOUBLE)
class PyTorchVAE(VAEExperiment):
    pass


@entry(reason=NORMS, trainer=DOUBLE)
class PyTorchVAEWithNorms(VAEExperiment):
    norm = True


@entry(trainer=DOUBLE)
class PyTorchVAEWithoutNoise(VAEExperiment):
    network = MeanVAE


@entry(trainer=DOUBLE)
class PyTorchBetaVAE(VAEExperiment):
    network = BetaVAE


class VectorQuantizer(nn.Module):
    """The codebook of VQ-VAE, as a layer that returns its loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.embedding.weight.data.uniform_(-1 / 6, 1 / 6)

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latents = latents.permute(0, 2, 3, 1).contiguous()
        flat = latents.view(-1, 4)
        weight = self.embedding.weight
        dist = torch.sum(flat**2, dim=1, keepdim=True) + torch.sum(weight**2, dim=1)
        inds = torch.argmin(dist - 2 * torch.matmul(flat, weight.t()), dim=1).unsqueeze(1)
        one_hot = torch.zeros(inds.size(0), 6, dtype=flat.dtype).scatter_(1, inds, 1)
        quantized = torch.matmul(one_hot, weight).view(latents.shape)
        loss = 0.25 * F.mse_loss(quantized.detach(), latents)
        loss = loss + F.mse_loss(quantized, latents.detach())
        quantized = latents + (quantized - latents).detach()
        return quantized.permute(0, 3, 1, 2).contiguous(), loss


@entry(trainer=DOUBLE)
class PyTorchVQVAE(Images):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 4, 2, 1), nn.LeakyReLU(), nn.Conv2d(8, 4, 1)
        )
        self.vq_layer = VectorQuantizer()
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.LeakyReLU(), nn.ConvTranspose2d(8, CHANNELS, 4, 2, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        quantized, vq_loss = self.vq_layer(self.encoder(x))
        recons_loss = F.mse_loss(self.decoder(quantized), x)
        self.log_dict({"Reconstruction_Loss": recons_loss, "VQ_Loss": vq_loss})
        return recons_loss + vq_loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class CouplingLayer(nn.Module):
    """The notebook's coupling with a scaling factor; passes the determinant along."""

    def __init__(self, turn: int) -> None:
        super().__init__()
        mask = (torch.arange(SIDE)[:, None] + torch.arange(SIDE)) % 2 == turn
        self.register_buffer("mask", mask.double()[None, None])
        self.network = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 2 * CHANNELS, 3, padding=1)
        )
        self.scaling_factor = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, z: Tensor, ldj: Tensor) -> tuple[Tensor, Tensor]:
        s, t = self.network(z * self.mask).chunk(2, dim=1)
        s_fac = self.scaling_factor.exp().view(1, -1, 1, 1)
        s, t = torch.tanh(s / s_fac) * s_fac * (1 - self.mask), t * (1 - self.mask)
        return (z + t) * torch.exp(s), ldj + s.sum(dim=[1, 2, 3])


class Flow(Images):
    noise = False

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(CouplingLayer(i % 2) for i in range(4))
        self.prior = torch.distributions.Normal(loc=0.0, scale=1.0)

    def dequantize(self, x: Tensor) -> Tensor:
        noise = torch.rand_like(x) if self.noise else 0.5
        return (((x.clamp(-2, 1.9) + 2) * 4).floor() + noise) / 16

    def encode(self, imgs: Tensor) -> tuple[Tensor, Tensor]:
        z, ldj = self.dequantize(imgs), torch.zeros(imgs.shape[0], device=self.device)
        for flow in self.flows:
            z, ldj = flow(z, ldj)
        return z, ldj

    def _get_likelihood(self, imgs: Tensor) -> Tensor:
        z, ldj = self.encode(imgs)
        log_px = ldj + self.prior.log_prob(z).sum(dim=[1, 2, 3])
        bpd = -log_px * math.log2(math.e) / math.prod(imgs.shape[1:])
        return bpd.mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._get_likelihood(batch[0])
        self.log("train_bpd", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_bpd", self._get_likelihood(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)]


@entry(trainer=DOUBLE)
class UvAImageFlow(Flow):
    pass


@entry(trainer=DOUBLE)
class UvAImageFlowWithDequantization(Flow):
    noise = True


class Sinusoids(nn.Module):
    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.exp(-torch.arange(4) * 2.0)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.block1, self.block2 = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)),
            nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs)),
        )
        self.time, self.skip = nn.Linear(8, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.block1(x)) + self.time(t)[..., None, None]
        return F.silu(self.block2(h)) + self.skip(x)


class DiffusionUNet(nn.Module):
    """Lists of lists, as the popular implementation of diffusion has them."""

    def __init__(self) -> None:
        super().__init__()
        self.init_conv, self.time_mlp = nn.Conv2d(CHANNELS, 4, 3, padding=1), Sinusoids()
        self.downs = nn.ModuleList(
            [
                nn.ModuleList([ResnetBlock(4, 4), nn.Conv2d(4, 8, 4, 2, 1)]),
                nn.ModuleList([ResnetBlock(8, 8), nn.Conv2d(8, 8, 3, padding=1)]),
            ]
        )
        self.mid_block = ResnetBlock(8, 8)
        self.ups = nn.ModuleList(
            [
                nn.ModuleList([ResnetBlock(16, 8), nn.ConvTranspose2d(8, 4, 2, 2)]),
                nn.ModuleList([ResnetBlock(8, 4), nn.Conv2d(4, 4, 3, padding=1)]),
            ]
        )
        self.final_conv = nn.Conv2d(4, CHANNELS, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x, t, h = self.init_conv(x), self.time_mlp(time.to(x.dtype)), []
        for block, downsample in self.downs:
            x = block(x, t)
            h.append(x)
            x = downsample(x)
        x = self.mid_block(x, t)
        for block, upsample in self.ups:
            x = block(torch.cat((x, h.pop()), dim=1), t)
            x = upsample(x)
        return self.final_conv(x)


class DDPM(Images):
    """Denoising diffusion; here with times and noise that follow from the data."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DiffusionUNet()
        betas = torch.linspace(1e-2, 0.3, 10, dtype=torch.float64)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0))

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (x[:, 0, 0, 0].abs() * 5).long().clamp(max=9), torch.sin(50 * x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        t, noise = self.draw(x)
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        predicted = self.model(a.sqrt() * x + (1 - a).sqrt() * noise, t)
        loss = F.mse_loss(predicted, noise, reduction="none").flatten(1).mean(1)
        loss = (loss * 1.0).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.99))


@entry(trainer=DOUBLE)
class LucidrainsDiffusion(DDPM):
    pass


@entry(trainer=DOUBLE)
class LucidrainsDiffusionWithNoise(DDPM):
    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 10, (x.shape[0],), device=x.device), torch.randn_like(x)


@entry(reason="Its sampler has a backward pass of its own.", random=True, trainer=DOUBLE)
class UvADeepEnergyModel(Images):
    """Real and sampled images through one network, after an inner loop over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(CHANNELS, 6, 5, 2, 4),
            nn.SiLU(),
            nn.Conv2d(6, 12, 3, 2, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(108, 8),
            nn.SiLU(),
            nn.Linear(8, 1),
        )

    def sample(self, count: int) -> Tensor:
        inp_imgs = torch.rand(count, CHANNELS, SIDE, SIDE) * 2 - 1
        for p in self.cnn.parameters():
            p.requires_grad = False
        inp_imgs.requires_grad = True
        for _ in range(2):
            out_imgs = -self.cnn(inp_imgs).squeeze(dim=-1)
            out_imgs.sum().backward()
            inp_imgs.data.add_(-10 * inp_imgs.grad.data.clamp_(-0.03, 0.03))
            inp_imgs.grad.zero_()
        for p in self.cnn.parameters():
            p.requires_grad = True
        return inp_imgs.detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        real_imgs, _ = batch
        real_imgs.add_(torch.randn_like(real_imgs) * 0.005).clamp_(min=-1.0, max=1.0)
        inp_imgs = torch.cat([real_imgs, self.sample(len(real_imgs))], dim=0)
        real_out, fake_out = self.cnn(inp_imgs).squeeze(dim=-1).chunk(2, dim=0)
        reg_loss = 0.1 * (real_out**2 + fake_out**2).mean()
        cdiv_loss = fake_out.mean() - real_out.mean()
        self.log("loss", reg_loss + cdiv_loss)
        return reg_loss + cdiv_loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-4, betas=(0.0, 0.999))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.97)]


@entry(reason="It optimizes by hand, with two optimizers.", random=True)
class LightningGAN(L.LightningModule):
    """Lightning's example: a generator and a discriminator that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, PIXELS))
        self.discriminator = nn.Sequential(
            nn.Linear(PIXELS, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()
        )

    loader = Images.loader

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any) -> None:
        imgs = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], 8).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        self.toggle_optimizer(optimizer_g)
        g_loss = F.binary_cross_entropy(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)
        self.toggle_optimizer(optimizer_d)
        real_loss = F.binary_cross_entropy(self.discriminator(imgs), valid)
        fake = self.discriminator(self(z).detach())
        d_loss = (real_loss + F.binary_cross_entropy(fake, 1 - valid)) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> Any:
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        return [opt_g, opt_d], []
