"""Trains, checkpoints, resumes and predicts on ranks that may take no more than so much memory.

    mpiexec -n 4 python -m benchmarks.capacity.limit --state 1611 --allowed 450 --file a.ckpt

The first call trains and writes the checkpoint, the second one goes on from it and predicts.
The dense state of the model (weights, gradients, two moments of AdamW) takes ``--state`` MB. The
limit is the system's (``RLIMIT_DATA``: what a process has in private memory that it may write,
touched or not), set before the first layer is made: what the process has then, and ``--allowed``
MB. With ``--ticket 0.8`` a ticket of random entries is adopted when the run starts. Prints a row of
Markdown.
"""

from __future__ import annotations

import argparse
import resource
from pathlib import Path
from typing import Any

import lightning as L
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.memory.step import resident
from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket

LAYERS, STEPS, STATE = 48, 3, 16
MB = 1_000_000


class Limited(L.LightningModule):
    """Equal layers, made where the process may take no more than ``allowed`` bytes for them."""

    def __init__(self, width: int, allowed: int) -> None:
        super().__init__()
        self.width, self.allowed = width, allowed
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
                limit = resident("VmData") + self.allowed
                resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
            layers = [nn.Linear(self.width, self.width, bias=False) for _ in range(LAYERS)]
            self.layers = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layers is not None
        return nn.functional.mse_loss(self.layers(batch), batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layers is not None
        return self.layers(batch).square().mean(1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def trainer(steps: int, ticket: Path | None) -> L.Trainer:
    """A Trainer of so many steps, on all ranks."""
    return L.Trainer(
        accelerator="cpu",
        devices=MPI.COMM_WORLD.size,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if ticket is None else [GradualPruning(ticket=ticket)],
        strategy=AxoSparseStrategy(MPI.COMM_WORLD.size, loss="mean"),
    )


def run(width: int, allowed: int, file: Path, ticket: Path | None) -> str:
    """Train and write a checkpoint, or go on from it and predict; returns what was done."""
    L.seed_everything(0, verbose=False)
    data = DataLoader(torch.randn(64, width), batch_size=16)
    model, resumes = Limited(width, allowed), file.exists()
    run = trainer(2 * STEPS if resumes else STEPS, ticket)
    try:
        run.fit(model, data, ckpt_path=file if resumes else None, weights_only=False)
        if resumes:
            run.predict(model, data)
        else:
            run.save_checkpoint(file)
    except (OSError, RuntimeError, MemoryError) as error:
        if MPI.COMM_WORLD.size > 1:
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
    return "resumed, predicted" if resumes else "trained, wrote a checkpoint"


def drawn(width: int, ratio: float, path: Path) -> Path:
    """Write a ticket that keeps random entries of every layer."""
    torch.manual_seed(0)
    masks = {f"layers.{i}.weight": torch.rand(width, width) >= ratio for i in range(LAYERS)}
    Ticket(masks, pruning_ratio=ratio).save(path)
    return path


def main() -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=int, required=True, help="of the dense model, MB")
    parser.add_argument("--allowed", type=int, required=True, help="for each rank, MB")
    parser.add_argument("--file", type=Path, required=True, help="the checkpoint")
    parser.add_argument("--ticket", type=float, help="pruning ratio of the ticket")
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    width = int((options.state * MB / STATE / LAYERS) ** 0.5)
    ticket = options.file.with_suffix(".ticket") if options.ticket else None
    if ticket is not None and world.rank == 0:
        drawn(width, options.ticket, ticket)
    world.barrier()
    outcome = run(width, options.allowed * MB, options.file, ticket)
    if world.rank == 0:
        state = STATE * LAYERS * width * width / MB
        print(
            f"| {world.size} | {options.ticket or 'no'} | {state:.0f} | {options.allowed} "
            f"| {state / options.allowed:.1f} | {outcome} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
