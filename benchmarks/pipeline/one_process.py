"""Compares two stages, dense and pruned, with one process of plain Lightning on the same two cores.

    python -m benchmarks.pipeline.one_process [--width 64 128 256 512 1024]

Trains the GPT of the examples on random bytes. Plain Lightning runs with two threads, and with one.
Where the strategy runs products by oneDNN, plain Lightning also runs with oneDNN's, so that the
stages alone can be seen. Runs alternate; each reports the median of its steps after the first five,
and the table has medians over the rounds. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl

CONTEXT, VOCABULARY, SKIPPED = 128, 256, 5


class Clock(L.Callback):
    """Records the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.last = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now


def step_seconds(width: int, steps: int, batch: int, ratio: float = 0.0, **options: Any) -> float:
    """Return the median time of a step, in seconds."""
    torch.manual_seed(0)
    model = GPT(width=width, depth=8, heads=width // 64, context=CONTEXT, vocabulary=VOCABULARY)
    tokens = torch.randint(VOCABULARY, (steps * batch, CONTEXT + 1))
    data = DataLoader([(row[:-1], row[1:]) for row in tokens], batch)
    clock = Clock()
    callbacks: list[L.Callback] = [clock]
    if ratio:
        callbacks.append(GradualPruning(ticket=Ticket.magnitude(model, ratio)))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=callbacks,
        **dict.fromkeys(quiet, False),
        **options,
    )
    trainer.fit(model, data)
    return statistics.median(clock.seconds[SKIPPED:])


def with_threads(threads: int, width: int, steps: int, batch: int, onednn: bool = False) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with without_mkl() if onednn else nullcontext():
            return step_seconds(width, steps, batch, devices=1)
    finally:
        torch.set_num_threads(before)


def in_two_stages(width: int, steps: int, batch: int, ratio: float = 0.0) -> float:
    strategy = AxoSparseStrategy(g_inter=2, microbatches=4, loss="mean")
    return step_seconds(width, steps, batch, ratio, devices=2, strategy=strategy)


def runs(width: int, steps: int, batch: int) -> dict[str, Callable[[], float]]:
    shape = width, steps, batch
    alone = {
        "one process, two threads": partial(with_threads, 2, *shape),
        "one process, one thread": partial(with_threads, 1, *shape),
    }
    if onednn_is_faster([torch.Size([4 * width, width])]):
        alone |= {f"{name}, oneDNN": partial(run, onednn=True) for name, run in alone.items()}
    return {
        **alone,
        "two stages": partial(in_two_stages, *shape),
        "two stages, 80 % pruned": partial(in_two_stages, *shape, 0.8),
        "two stages, 90 % pruned": partial(in_two_stages, *shape, 0.9),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=14)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print("| width | run | ms a step | this / one process, two threads |")
    print("| --: | --- | --: | --: |")
    for width in options.width:
        runners = runs(width, options.steps, options.batch)
        rounds = [{name: run() for name, run in runners.items()} for _ in range(options.rounds)]
        medians = {name: statistics.median(each[name] for each in rounds) for name in runners}
        base = medians["one process, two threads"]
        for name, median in medians.items():
            print(f"| {width} | {name} | {median * 1e3:.0f} | {median / base:.2f} |", flush=True)


if __name__ == "__main__":
    main()
