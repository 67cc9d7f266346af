"""Measures the memory of every rank while a checkpoint of a pipeline is written.

    mpiexec -n 4 python -m benchmarks.capacity.checkpoint

A model of 24 equal layers, AdamW, takes a step as four stages and writes a checkpoint: gathered on
the first rank (as for a hook that reads it), as one streamed file, and as a folder. Prints Markdown
rows: by how much the resident set of each rank rises at most.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.memory.step import resident
from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.support.memory import release_freed_memory

LAYERS = 24


class Equal(L.LightningModule):
    """A model of equal layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Compute any loss."""
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Configure AdamW."""
        return torch.optim.AdamW(self.parameters())


class ReadsCheckpoint(Callback):
    """A hook that might read the checkpoint, so that all of it is gathered before."""

    def on_save_checkpoint(self, *_: Any) -> None:
        """Do nothing."""


class Saves(Callback):
    """Writes a checkpoint after the first step, and measures that.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.risen = 0.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Write and measure."""
        release_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = resident("VmRSS")
        trainer.save_checkpoint(self.path)
        self.risen = (resident("VmHWM") - before) / 1e6


def measure(form: str, width: int, folder: Path) -> Saves:
    """Take a step and write a checkpoint in one of the forms."""
    torch.manual_seed(0)
    saves = Saves(folder / form)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=MPI.COMM_WORLD.size,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, *([ReadsCheckpoint()] if form == "gathered" else [])],
        strategy=AxoSparseStrategy(
            MPI.COMM_WORLD.size, 4, save_distributed_checkpoint=form == "folder"
        ),
    )
    trainer.fit(Equal(width), DataLoader(TensorDataset(torch.randn(4, width)), 4))
    return saves


def main() -> None:
    """Print a row for each form."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=1024)
    options = arguments.parse_args()
    world = MPI.COMM_WORLD
    folder = Path(world.bcast(tempfile.mkdtemp() if world.rank == 0 else None))
    for form in ("gathered", "streamed", "folder"):
        saves = measure(form, options.width, folder)
        risen = world.gather(saves.risen)
        if risen is not None:
            cells = " | ".join(f"{megabytes:.0f} MB" for megabytes in risen)
            print(f"| {form} | {cells} |", flush=True)
    if world.rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
