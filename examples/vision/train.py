"""A residual network whose layers are in several containers, on scikit-learn's digits.

``python train.py``, with ``pip install '.[images]'``
"""

import argparse

import lightning as L
import torch
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.examples.data import ImageDataModule


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1),
        nn.GroupNorm(4, outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
    )


class ResNet(L.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.layer1 = nn.ModuleList(block(width, width, 1) for _ in range(2))
        self.shrink = block(width, 2 * width, 2)
        self.layer2 = nn.ModuleList(block(2 * width, 2 * width, 1) for _ in range(2))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layer1:
            x = torch.relu(x + layer(x))  # crosses the edge of stages with the activation
        x = self.shrink(x)
        for layer in self.layer2:
            x = torch.relu(x + layer(x))
        return self.head(x.mean((2, 3)))

    def training_step(self, batch, batch_idx):
        images, classes = batch
        loss = nn.functional.cross_entropy(self(images), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, classes = batch
        right = (self(images).argmax(1) == classes).float().mean()
        self.log("accuracy", right, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        strategy=AxoSparseStrategy(
            g_inter=2,
            microbatches=4,
            pipeline=["stem", "layer1", "shrink", "layer2"],  # in the order of forward
        ),
        logger=False,
    )
    trainer.fit(ResNet(options.width), datamodule=ImageDataModule(batch_size=64))
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
