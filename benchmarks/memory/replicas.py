"""Measures a rank's model state where replicas divide the optimizer's state.

    python -m benchmarks.memory.replicas

The model is that of ``step``, trained for two steps with AdamW in float32: dense by one rank, and
pruned before the first step by some replicas with ``shard_optimizer``. The state is what the first
rank has of weights, indices, gradients and AdamW's moments after a step. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.memory.step import TOKENS, masks_of
from lightning_axosparse import AxoSparseStrategy, sparsify
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.sparse.module.parameters import state_bytes

STEPS, VOCABULARY = 2, 10_000


class State(L.Callback):
    """Writes the bytes of the first rank's state to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write them."""
        if trainer.is_global_zero:
            self._path.write_text(str(state_bytes(pl_module, trainer.optimizers[0]).total))


def measure(ratio: float, replicas: int, width: int, depth: int) -> int:
    """Return the bytes of a rank's state after training with a share of the weights pruned."""
    L.seed_everything(0, verbose=False)
    model = GPT(width=width, depth=depth, heads=16, context=TOKENS, vocabulary=VOCABULARY)
    if ratio:
        sparsify(model, MaskBits(masks_of(model, ratio)))
    tokens = torch.randint(VOCABULARY, (replicas * STEPS, TOKENS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        strategy: Any = AxoSparseStrategy(microbatches=1, shard_optimizer=replicas > 1)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=replicas,
            strategy=strategy,
            max_steps=STEPS,
            callbacks=[State(path)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, DataLoader(TensorDataset(tokens, tokens), batch_size=1))
        return int(path.read_text())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ratios", nargs="+", type=float, default=[0.8, 0.9])
    arguments.add_argument("--replicas", nargs="+", type=int, default=[1, 2, 4])
    arguments.add_argument("--width", type=int, default=1024)
    arguments.add_argument("--depth", type=int, default=20)
    options = arguments.parse_args()
    print("| weights | replicas | state of a rank | dense / this |\n| --- | --: | --: | --: |")
    dense = measure(0.0, 1, options.width, options.depth)
    print(f"| dense | 1 | {dense / 1e6:.0f} MB | 1.0 |", flush=True)
    for ratio in options.ratios:
        for replicas in options.replicas:
            state = measure(ratio, replicas, options.width, options.depth)
            cells = f"{ratio * 100:.0f} % pruned | {replicas} | {state / 1e6:.0f} MB"
            print(f"| {cells} | {dense / state:.1f} |", flush=True)


if __name__ == "__main__":
    main()
