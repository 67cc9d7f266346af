"""Your own LightningModule, trained and pruned on two ranks: ``python train.py``."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, GradualPruning


class Classifier(L.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(32, width), *hidden, nn.Linear(width, 4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(samples: int, **options: bool) -> DataLoader:
    x = torch.randn(samples, 32)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=64, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    L.seed_everything(0)
    ticket = GradualPruning(pruning_ratio=0.8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=options.epochs,
        strategy=AxoSparseStrategy(g_inter=2, microbatches=4),
        callbacks=[ticket],
        logger=False,
    )
    trainer.fit(Classifier(options.width), data(4096, shuffle=True), data(1024))
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f}")
    print(f"{ticket.ticket.sparsity:.0%} pruned after {ticket.ticket.step} steps")
