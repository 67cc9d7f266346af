"""Measures the memory of ``load_from_checkpoint``, and of training with its module, on every rank.

    python -m benchmarks.capacity.load a.ckpt                        # one process writes the file
    mpiexec -n 4 python -m benchmarks.capacity.load a.ckpt           # ranks read it
    mpiexec -n 4 python -m benchmarks.capacity.load a.ckpt --mapped  # in trainer.init_module

24 equal layers take three steps of AdamW. "peak" is the largest resident set of the rank's process,
files that it has mapped included, minus the one that it has before it loads; "share" is the bytes
of its weights, gradients and optimizer state. Prints a row for each rank.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.capacity.peak import LAYER_BYTES, MB, WIDTH, made
from benchmarks.memory.step import resident
from lightning_axosparse import AxoSparseStrategy


class Saved(L.LightningModule):
    """Equal layers made in ``__init__``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = made()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch), batch)

    def on_train_end(self) -> None:
        self.kept = sum(p.nbytes for p in self.parameters() if not p.is_meta)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def main() -> None:
    """Write the file, or print this run's rows of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--mapped", action="store_true", help="load in trainer.init_module")
    options = parser.parse_args()
    L.seed_everything(0, verbose=False)
    world, data = MPI.COMM_WORLD, DataLoader(torch.randn(64, WIDTH), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world.size,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=AxoSparseStrategy(world.size),
    )
    if world.size == 1:
        trainer.fit(Saved(), data)
        trainer.save_checkpoint(options.file)
        return
    before = resident("VmHWM")
    with trainer.init_module(empty_init=True) if options.mapped else nullcontext():
        module = Saved.load_from_checkpoint(options.file, weights_only=False)
    loaded = resident("VmHWM") - before
    trainer.fit(module, data)
    share, peak = 4 * module.kept, resident("VmHWM") - before
    rows = world.gather((loaded / MB, share / MB, peak / MB))
    for rank, (*values, peak) in enumerate(rows or []):
        bar = (1.15 * share + 2 * LAYER_BYTES) / MB
        figures = " | ".join(f"{value:.0f}" for value in (*values, peak))
        print(f"| {options.mapped} | {rank} | {figures} | {peak / bar:.2f} |", flush=True)


if __name__ == "__main__":
    main()
