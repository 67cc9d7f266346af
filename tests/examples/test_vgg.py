from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import ChannelTicket
from lightning_axosparse.examples.vgg import VGG, VGG16
from lightning_axosparse.pruning.channels import find_channels
from tests.quiet import QUIET

SMALL = ((4, 4), (8,), (6,))


def test_vgg16_has_the_layers_of_the_paper() -> None:
    with torch.device("meta"):
        model = VGG()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [width for block in VGG16 for width in block]
    assert sum(p.numel() for p in model.parameters()) == 14_728_266 - sum(map(sum, VGG16))
    assert model.example_input_array.shape == (4, 3, 16, 16)


def test_logits_of_images_of_any_size() -> None:
    model = VGG(SMALL, image_channels=1, classes=5)
    assert model(model.example_input_array).shape == (4, 5)
    assert model(torch.zeros(2, 1, 13, 9)).shape == (2, 5)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all((norm.weight == 0.5).all() for norm in norms)


def test_every_convolution_can_lose_channels() -> None:
    model = VGG(SMALL)
    channels = find_channels(model)
    assert list(channels.scales.values()) == [4, 4, 8, 6]
    assert list(channels.whole.values()) == ["the network returns them"]
    ChannelTicket.largest(model, 0.5).apply(model)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_it_learns_and_its_rate_falls_twice() -> None:
    L.seed_everything(0, verbose=False)
    classes = torch.arange(64) % 2
    images = torch.randn(64, 1, 8, 8) + 2.0 * (2 * classes - 1).view(-1, 1, 1, 1)
    model = VGG(SMALL, image_channels=1, classes=2, learning_rate=0.05)
    loader = DataLoader(TensorDataset(images, classes), 16)
    rates = []

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=10,
        callbacks=[Rates()],
        **QUIET,
    )
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val_accuracy"] > 0.9
    assert trainer.callback_metrics["val_loss"] < 0.5
    assert rates[18::10] == pytest.approx([0.05, 0.005, 0.0005])
    trainer.test(model, loader, verbose=False)
    assert trainer.callback_metrics["test_accuracy"] > 0.9
