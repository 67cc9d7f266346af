"""Measures the peak memory of every rank of a run: start, three steps of AdamW, end.

    python -m benchmarks.capacity.peak 4 8

The arguments are numbers of stages. A model of 24 equal layers, made in ``configure_model``, trains
on ranks that the call starts. "peak" is the largest resident set of the rank's process, minus the
one that it has when it has imported everything and connected to the others; "share" is the bytes of
its weights, gradients and optimizer state. Prints a row for each rank. ``--checkpoint`` writes one
in the run, ``--resume`` measures the run that goes on from it, and with ``--whole`` the layers are
made in ``__init__``, before the ranks are started.
"""

from __future__ import annotations

import argparse
import atexit
import json
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.memory.step import resident
from lightning_axosparse import AxoSparseStrategy

LAYERS, WIDTH = 24, 2048
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
MB = 1_000_000


def made() -> nn.Sequential:
    """The layers."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


class Equal(L.LightningModule):
    """Equal layers; each rank writes what it took to a file of ``folder`` when it exits."""

    def __init__(self, folder: str, whole: bool) -> None:
        super().__init__()
        self.folder = folder
        self.layers = made() if whole else None

    def configure_model(self) -> None:
        atexit.register(self.report, resident("VmRSS"))
        if self.layers is None:
            self.layers = made()

    def report(self, before: int) -> None:
        peak = resident("VmHWM") - before
        row = {"rank": self.rank, "peak": peak, "share": 4 * self.kept, "before": before}
        (Path(self.folder) / f"{self.rank}.json").write_text(json.dumps(row))

    def on_fit_start(self) -> None:
        self.rank = self.global_rank
        self.kept = sum(p.nbytes for p in self.parameters() if not p.is_meta)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.layers is not None
        return nn.functional.mse_loss(self.layers(batch), batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def measure(
    stages: int, folder: str, whole: bool, checkpoint: bool, resumed: Path | None
) -> list[dict[str, int]]:
    """Train on so many stages, and return the row of each rank."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=stages,
        max_steps=3 if resumed is None else 6,
        logger=False,
        enable_checkpointing=checkpoint,
        callbacks=[ModelCheckpoint(folder, "last")] if checkpoint else [],
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=AxoSparseStrategy(g_inter=stages, loss="mean"),
    )
    L.seed_everything(0, verbose=False)
    data = DataLoader(torch.randn(64, WIDTH), batch_size=16)
    trainer.fit(Equal(folder, whole), data, ckpt_path=resumed)
    files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text()) for file in files]


def rows(stages: int, whole: bool, checkpoint: bool, resume: bool) -> list[dict[str, int]]:
    """The rows of a run, or of the run that goes on from its checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        found = measure(stages, folder, whole, checkpoint or resume, None)
        if not resume:
            return found
        return measure(stages, folder, whole, False, Path(folder) / "last.ckpt")


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", type=int, nargs="+")
    parser.add_argument("--whole", action="store_true", help="make the layers in __init__")
    parser.add_argument(
        "--checkpoint", action="store_true", help="write one, as fit does at its end"
    )
    parser.add_argument(
        "--resume", action="store_true", help="measure a run that goes on from a checkpoint"
    )
    options = parser.parse_args()
    print("| stages | rank | share, MB | peak, MB | peak / (1.15 share + 2 layers) |")
    print("| --: | --: | --: | --: | --: |")
    for stages in options.stages:
        for row in rows(stages, options.whole, options.checkpoint, options.resume):
            bar = 1.15 * row["share"] + 2 * LAYER_BYTES
            print(
                f"| {stages} | {row['rank']} | {row['share'] / MB:.0f} | {row['peak'] / MB:.0f} "
                f"| {row['peak'] / bar:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
