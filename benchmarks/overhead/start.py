"""Measures how long a Trainer's call takes to start ranks.

    python -m benchmarks.overhead.start

Each trial is a process of its own, with a ``fit`` of a small module by Lightning alone, then
three on two ranks, which are forks or, in "cold" trials, new Pythons. Trials are interleaved.
Prints a Markdown table with the medians of the seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import time
import warnings

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.launcher import fork_server


class Small(L.LightningModule):
    """Three layers, and eight batches."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(64, 32), batch_size=8)


def seconds_of_fit(ranks: int) -> float:
    started = time.perf_counter()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=AxoSparseStrategy(g_inter=ranks) if ranks > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small())
    return time.perf_counter() - started


def trial(cold: bool) -> list[float]:
    """The seconds of the calls of this process, in order."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if cold:
        fork_server.prepare = lambda: None
    return [seconds_of_fit(ranks) for ranks in (1, 2, 2, 2)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=5)
    arguments.add_argument("--trial", choices=("warm", "cold"), help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.trial:
        print(json.dumps(trial(options.trial == "cold")))
        return
    seconds: dict[str, list[list[float]]] = {"warm": [], "cold": []}
    for _ in range(options.trials):
        for kind, found in seconds.items():
            command = [sys.executable, "-m", "benchmarks.overhead.start", "--trial", kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    print("| ranks | Lightning alone | first call | second call | third call |")
    print("| --- | --: | --: | --: | --: |")
    for kind, name in (("warm", "forks"), ("cold", "new Pythons")):
        medians = (statistics.median(each) for each in zip(*seconds[kind], strict=True))
        print(f"| {name} | {' | '.join(f'{each:.1f} s' for each in medians)} |")


if __name__ == "__main__":
    main()
