"""Measures how long training waits for a checkpoint, which a thread may write meanwhile."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.checkpoint.atomic_io import AtomicCheckpointIO
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT

KINDS = ("none", "at once", "in a thread")


class Saving(L.Callback):
    """Saves after each step in turn not at all, at once, in a thread; times save and next step."""

    def __init__(self, file: Path) -> None:
        self.file, self.began = file, 0.0
        self.waits: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.steps: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, at: int) -> None:
        """End the step behind one save, and begin the next save."""
        strategy = trainer.strategy
        if at > len(KINDS):  # The first round warms up.
            self.steps[KINDS[(at - 1) % len(KINDS)]].append(time.perf_counter() - self.began)
        strategy.checkpoint_io.teardown()  # A thread ends before the next save begins.
        kind = KINDS[at % len(KINDS)]
        threaded = kind == "in a thread"
        strategy.checkpoint_io = AsyncCheckpointIO() if threaded else AtomicCheckpointIO()
        strategy.barrier()
        self.began = time.perf_counter()
        if kind != "none":
            trainer.save_checkpoint(self.file)
        if at >= len(KINDS):
            self.waits[kind].append(time.perf_counter() - self.began)
        self.began = time.perf_counter()


def measure(stages: int, width: int, trials: int, folder: Path, as_folder: bool) -> Saving:
    """Train a GPT in stages, and return the times of its first rank."""
    saving = Saving(folder / "a.ckpt")
    L.Trainer(
        accelerator="cpu",
        devices=stages,
        max_steps=(trials + 1) * len(KINDS) + 1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=AxoSparseStrategy(g_inter=stages, save_distributed_checkpoint=as_folder),
        callbacks=[saving],
    ).fit(
        GPT(width=width, depth=4, heads=8, context=64),
        TextDataModule(context=64, batch_size=16, max_bytes=500_000),
    )
    return saving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--folder", action="store_true", help="all stages write to a folder")
    arguments = parser.parse_args()
    print("| stages | MB | saved | waits for the save, s | next step, s |")
    print("| --: | --: | --- | --: | --: |")
    for stages in arguments.stages:
        with tempfile.TemporaryDirectory() as folder:
            options = arguments.width, arguments.trials, Path(folder), arguments.folder
            saving = measure(stages, *options)
            files = [file for file in Path(folder).rglob("*") if file.is_file()]
            size = sum(file.stat().st_size for file in files) / 1e6
        for kind in KINDS:
            wait, step = median(saving.waits[kind]), median(saving.steps[kind])
            print(f"| {stages} | {size:.0f} | {kind} | {wait:.2f} | {step:.2f} |", flush=True)


if __name__ == "__main__":
    main()
