"""Measures the peak memory of every rank of a run: start, three steps of AdamW, a checkpoint, end.

    python -m benchmarks.capacity.peak 4 8

The arguments are numbers of stages. A model of 24 equal layers, made in ``configure_model``, trains
on ranks that the call starts. "peak" is the largest resident set of the rank's process, minus the
one that it has when it has imported everything and connected to the others; "share" is the bytes of
its weights, gradients and optimizer state. Prints a row for each rank.
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
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.memory.step import resident
from lightning_axosparse import AxoSparseStrategy

LAYERS, WIDTH = 24, 2048
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
MB = 1_000_000


class Equal(L.LightningModule):
    """Equal layers; each rank writes what it took to a file of ``folder`` when it exits."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        atexit.register(self.report, resident("VmRSS"))
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

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


def measure(stages: int, checkpoint: bool) -> list[dict[str, int]]:
    """Train on so many stages, and return the row of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=stages,
            max_steps=3,
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=checkpoint,
            enable_progress_bar=False,
            enable_model_summary=False,
            strategy=AxoSparseStrategy(g_inter=stages),
        )
        L.seed_everything(0)
        trainer.fit(Equal(folder), DataLoader(torch.randn(64, WIDTH), batch_size=16))
        files = sorted(Path(folder).glob("*.json"), key=lambda file: int(file.stem))
        return [json.loads(file.read_text()) for file in files]


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", type=int, nargs="+")
    parser.add_argument(
        "--checkpoint", action="store_true", help="write one, as fit does at its end"
    )
    options = parser.parse_args()
    print("| stages | rank | share, MB | peak, MB | peak / (1.15 share + 2 layers) |")
    print("| --: | --: | --: | --: | --: |")
    for stages in options.stages:
        for row in measure(stages, options.checkpoint):
            bar = 1.15 * row["share"] + 2 * LAYER_BYTES
            print(
                f"| {stages} | {row['rank']} | {row['share'] / MB:.0f} | {row['peak'] / MB:.0f} "
                f"| {row['peak'] / bar:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
