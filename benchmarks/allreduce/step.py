"""Measures a data-parallel step: dense under Lightning's ddp on gloo, pruned under this strategy.

    python -m benchmarks.allreduce.step
    python -m benchmarks.allreduce.step --ranks 4

Ranks with a thread each train 8 transformer blocks 1024 wide (100 M parameters) with AdamW in
float32. Each run is a Trainer's, in processes of its own; the runs alternate. A step is the time
from the end of a batch to the end of the next, on rank 0; the state is what it has of weights,
indices, gradients and AdamW's moments after a step. ``--runs`` selects rows. Prints a Markdown
table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy, GradualPruning
from lightning_axosparse.examples.gpt import Block
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.module.parameters import state_bytes

RUNS = {
    "dense, Lightning's ddp": (None, False),
    "dense, ours": (0.0, False),
    "dense, shard_optimizer": (0.0, True),
    "80 % pruned": (0.8, False),
    "80 % pruned, shard_optimizer": (0.8, True),
    "90 % pruned": (0.9, False),
    "90 % pruned, shard_optimizer": (0.9, True),
}
"""What is run: under Lightning's own strategy (None), or ours with this share pruned, and whether
replicas divide the optimizer's state."""

WARM_UP = 3


class Blocks(L.LightningModule):
    """Transformer blocks, without embeddings, that learn to return zeros."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.model = nn.Sequential(*(Block(width, heads, 0.0) for _ in range(depth)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.nn.functional.mse_loss(self.model(batch), torch.zeros_like(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


class StepTimes(L.Callback):
    """Writes the median time of a step, and the bytes of the state, to a file."""

    def __init__(self, path: str) -> None:
        self._path, self._ends = path, list[float]()

    def on_train_batch_end(self, *_: Any) -> None:
        """Note the time."""
        self._ends.append(time.perf_counter())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the result."""
        ends = self._ends[WARM_UP:]
        steps = [end - start for start, end in pairwise(ends)]
        if trainer.is_global_zero:
            state = state_bytes(pl_module, trainer.optimizers[0]).total
            Path(self._path).write_text(json.dumps([statistics.median(steps), state]))


def run(name: str, path: str, options: argparse.Namespace) -> None:
    """Train some steps in one way."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    model, (ratio, shards) = Blocks(options.width, options.depth), RUNS[name]
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    callbacks: list[L.Callback] = [StepTimes(path)]
    if ratio is not None:
        strategy = AxoSparseStrategy(g_inter=1, microbatches=1, shard_optimizer=shards)
    if ratio:
        callbacks.append(GradualPruning(ticket=Ticket.magnitude(model, ratio, floor=1.0)))
    steps = options.steps + WARM_UP
    data = list(torch.randn(options.ranks * steps, options.tokens, options.width))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=strategy,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=1))  # type: ignore[arg-type]


def measure(name: str, given: list[str]) -> tuple[float, int]:
    """Return the median time of a step of one run, and the bytes of its state."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "measured")
        command = [sys.executable, "-m", __spec__.name, "--run", name, "--path", path, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        seconds, state = json.loads(Path(path).read_text())
        return seconds, state


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--depth", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=128, help="of each rank's sequence")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=7)
    arguments.add_argument("--trials", type=int, default=3)
    arguments.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    arguments.add_argument("--run", choices=list(RUNS), help=argparse.SUPPRESS)
    arguments.add_argument("--path", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.run:
        run(options.run, options.path, options)
        return
    given = [
        word
        for name in ("width", "depth", "tokens", "ranks", "steps")
        for word in (f"--{name}", str(getattr(options, name)))
    ]
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in options.runs}
    for _ in range(options.trials):
        for name, measured in found.items():
            measured.append(measure(name, given))
    medians = {name: statistics.median(s for s, _ in each) for name, each in found.items()}
    base = next(iter(medians.values()))
    print("| weights, strategy | step | ratio | state of a rank |\n| --- | --: | --: | --: |")
    for name, median in medians.items():
        state = found[name][0][1] / 1e6
        print(f"| {name} | {median * 1e3:.0f} ms | {median / base:.2f} | {state:.0f} MB |")


if __name__ == "__main__":
    main()
