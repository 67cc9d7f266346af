"""Measures how long a script takes until two ranks have made their first optimizer step.

    python -m benchmarks.capacity.start

Each run is a Python process of its own that calls ``fit``, which starts the second rank (ddp of
Lightning) or both (this strategy); the runs alternate. Time counts from the start of the process to
the end of the first batch on rank 0. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

RUNS = ("Lightning's ddp on gloo", "ours, two replicas", "ours, two stages")


def run(name: str, file: str) -> None:
    """Fit one batch on two ranks, and write the time of its end."""
    import lightning as L
    import torch
    from lightning.pytorch.demos.boring_classes import RandomDataset
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_axosparse import AxoSparseStrategy

    class Layers(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class FirstStep(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            """Write the time."""
            if trainer.is_global_zero:
                Path(file).write_text(str(time.time()))

    strategies: dict[str, Any] = {
        RUNS[0]: lambda: DDPStrategy(process_group_backend="gloo"),
        RUNS[1]: lambda: AxoSparseStrategy(g_inter=1, microbatches=1),
        RUNS[2]: lambda: AxoSparseStrategy(g_inter=2),
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategies[name](),
        max_steps=1,
        callbacks=[FirstStep()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=16)
    trainer.fit(Layers(), data)


def seconds(name: str) -> tuple[float, float]:
    """Return the time to the first step of one run, and that to its end."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "time"
        start = time.time()
        command = [sys.executable, "-m", __spec__.name, "--run", name, "--file", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return float(file.read_text()) - start, time.time() - start


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=7)
    arguments.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    arguments.add_argument("--file", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.run:
        run(options.run, options.file)
        return
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    for _ in range(options.trials):
        for name, times in found.items():
            times.append(seconds(name))
    medians = {name: [median(each) for each in zip(*x, strict=True)] for name, x in found.items()}
    (base, base_end), *_ = medians.values()
    print("| two ranks | to the first step | ratio | to the end | ratio |")
    print("| --- | --: | --: | --: | --: |")
    for name, (step, end) in medians.items():
        print(f"| {name} | {step:.1f} s | {step / base:.2f} | {end:.1f} s | {end / base_end:.2f} |")


if __name__ == "__main__":
    main()
