"""Checks that training with the strategy on one GPU gives plain Lightning's losses.

    python -m benchmarks.gpu.training              # on a CUDA device
    python -m benchmarks.gpu.training --tiny       # on CPU: does it all work?

Trains a small GPT on random bytes, whose ticket is drawn after the first epoch, with every feature
that has code for GPUs. Prints a Markdown table: the largest difference of a loss from plain
Lightning's before the draw, the largest difference from the first row after the draw, and the bound
of each row. The exit status says whether all rows are within their bounds.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed.mpi.staging import PinnedStaging
from lightning_axosparse.examples.gpt import GPT

BATCHES, EPOCHS = 6, 2

# Row: name, the strategy's arguments, the ticket's `compute`, the Trainer's precision, the bound.
ROWS: tuple[tuple[str, dict[str, Any], Literal["auto", "samo"], Any, float], ...] = (
    ("1x1", {}, "auto", "32-true", 1e-5),
    ("4 micro-batches", {"microbatches": 4, "loss": "mean"}, "auto", "32-true", 1e-4),
    ("samo", {}, "samo", "32-true", 1e-5),
    ("2 stages, loopback", {"g_inter": 2, "transport": "loopback"}, "auto", "32-true", 1e-4),
    ("recompute", {"recompute": 1}, "auto", "32-true", 1e-5),
    ("bf16-mixed", {}, "auto", "bf16-mixed", 2e-2),
    ("bf16-mixed, samo", {}, "samo", "bf16-mixed", 2e-2),
    ("16-mixed", {}, "auto", "16-mixed", 2e-2),
)


class Losses(Callback):
    """Records the loss of every step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.all.append(float(outputs["loss"]))


def losses(strategy: Any, accelerator: str, precision: Any, *callbacks: Callback) -> list[float]:
    """Return the losses of a run."""
    L.seed_everything(0, verbose=False)
    kept = Losses()
    tokens = torch.randint(256, (8 * BATCHES, 33), generator=torch.Generator().manual_seed(1))
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=8)
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[kept, *callbacks],
    )
    trainer.fit(GPT(width=64, depth=4, heads=4, context=32), data)
    return kept.all


def check_staging(device: torch.device) -> None:
    """Check thirty times that a tensor is unchanged after a copy through pinned memory."""
    staging = PinnedStaging(device)
    for number in range(30):
        block = (torch.rand(1_000_000, device=device).sort().values * 100 + number).byte()
        host, ready = staging.outgoing(block)
        while not ready():
            pass
        received = staging.empty(host.numel()).copy_(host)
        assert torch.equal(staging.incoming(received), block)


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference of two runs' losses."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tiny", action="store_true", help="on CPU")
    options = arguments.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No CUDA device here: run with --tiny to try the script on CPU.")
    warnings.simplefilter("ignore")
    accelerator = "cpu" if options.tiny else "cuda"
    if not options.tiny:
        check_staging(torch.device("cuda"))
    plain = {
        precision: losses("auto", accelerator, precision)[:BATCHES]
        for precision in dict.fromkeys(row[3] for row in ROWS)
    }
    drawn: list[float] = []
    kept_all = True
    print("| row | before the draw | after it | bound |\n| --- | --: | --: | --: |")
    for name, settings, compute, precision, bound in ROWS:
        ticket = EarlyBirdTicket(0.5, every="1 epoch", draw_by="1 epoch", compute=compute)
        strategy = AxoSparseStrategy(**{"g_inter": 1, **settings})
        found = losses(strategy, accelerator, precision, ticket)
        drawn = drawn or found[BATCHES:]
        before = difference(found[:BATCHES], plain[precision])
        after = difference(found[BATCHES:], drawn)
        kept_all = kept_all and max(before, after) <= bound
        print(f"| {name} | {before:.1e} | {after:.1e} | {bound:.0e} |", flush=True)
    sys.exit(not kept_all)


if __name__ == "__main__":
    main()
