"""Generative modules in the shape of notebooks and collections."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.published.vision import CHANNELS, DOUBLE, SIDE, Images

PIXELS = CHANNELS * SIDE * SIDE


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
