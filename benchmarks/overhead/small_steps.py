"""Measures the steps of a small model, which are mostly Python, against plain Lightning's.

    python -m benchmarks.overhead.small_steps

Layers of width 64; a batch has 64 samples. One rank with one micro-batch is compared with Lightning
alone, two stages in one process with four micro-batches with ``accumulate_grad_batches=4``. Fits
are interleaved, in one thread. Prints a Markdown table: processor time of a step, the functions
that it enters, and the ratio of medians to Lightning's.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse import AxoSparseStrategy

BATCH, WIDTH, LAYERS, WARM_UP = 64, 64, 8, 20
"""Samples of an optimizer step, size of the model, and steps of a fit that are not timed."""


class Linears(L.LightningModule):
    """Layers in a row; notes when its steps begin and how many functions the last one enters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.begun: list[float] = []
        self.entered: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun.append(time.thread_time())
        if self.global_step == self.trainer.max_steps - 1:
            sys.setprofile(partial(_note, self.entered))

    def on_train_end(self) -> None:
        sys.setprofile(None)


def _note(entered: list[str], frame: Any, event: str, _: Any) -> None:
    if event == "call":
        entered.append(frame.f_code.co_name)


def fit(strategy: Callable[[], Any], parts: int, steps: int) -> tuple[float, int]:
    """Train on batches of a step's samples in so many parts.

    Returns:
        The seconds of a step and how many functions it enters.
    """
    module, samples = Linears(), torch.randn(BATCH * steps, WIDTH)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy(),
        max_steps=steps,
        accumulate_grad_batches=parts,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(samples, samples), BATCH // parts))
    begun = module.begun[::parts]
    steps_taken = [after - before for before, after in pairwise(begun)]
    return statistics.median(steps_taken[WARM_UP:]), len(module.entered)


CASES: dict[str, tuple[Callable[[], Any], int]] = {
    "Lightning": (lambda: "auto", 1),
    "one rank, one micro-batch": (partial(AxoSparseStrategy, 1, microbatches=1), 1),
    "Lightning, 4 batches accumulated": (lambda: "auto", 4),
    "2 stages by loopback, 4 micro-batches": (
        partial(AxoSparseStrategy, 2, microbatches=4, transport="loopback"),
        1,
    ),
}
"""What runs, each after the case of plain Lightning that it is compared with."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=120, help="of a fit")
    arguments.add_argument("--trials", type=int, default=9)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in CASES}
    for _ in range(options.trials):
        for name, (strategy, parts) in CASES.items():
            found[name].append(fit(strategy, parts, options.steps))
    print("| what | step | functions | this / Lightning |\n| --- | --: | --: | --: |")
    names = list(CASES)
    for number, name in enumerate(names):
        seconds = {each: statistics.median(s for s, _ in found[each]) for each in names}
        ratio = seconds[name] / seconds[names[number // 2 * 2]]
        functions = found[name][-1][1]
        print(f"| {name} | {seconds[name] * 1e3:.2f} ms | {functions} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
