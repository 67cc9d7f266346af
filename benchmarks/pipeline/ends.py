"""Compares training whose loss is differentiated once a batch with a declared ``loss="mean"``.

    mpiexec -n 2 python -m benchmarks.pipeline.ends
    mpiexec -n 2 python -m benchmarks.pipeline.ends --vocabulary 8192

A GPT trains on sequences of random tokens, 8 micro-batches of one sample, with one stage a rank.
Both ways train the same steps from the same weights in the same job, in turns. Printed are the
medians of the slowest rank's seconds for a step, and the largest rank's memory of a step: what is
allocated at most beside what was there before. Steps that are compared, or measured, do not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from mpi4py import MPI
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.interleave import sleeping_barrier
from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.examples.gpt import GPT
from lightning_axosparse.pipeline.profile import peak_bytes

WAYS: Mapping[str, Mapping[str, Any]] = {"mean": {"loss": "mean"}, "whole": {}}
STEPS, SAMPLES, COMPARED = 15, 8, (0, 1, 3, 7)
MEASURED = STEPS - 1
"""The step whose memory is measured, which takes time."""


class Steps(Callback):
    """Keeps the seconds of each step, those of the slowest rank, and the bytes of the last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.bytes = 0
        self._begin = 0.0
        self._peak = ExitStack()

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Begin to measure a step on all ranks at once."""
        sleeping_barrier(MPI.COMM_WORLD)
        if batch_idx == MEASURED:
            self._taken = self._peak.enter_context(peak_bytes(module.device))
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step, if it is none of those that are compared."""
        seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - self._begin, op=MPI.MAX)
        if batch_idx == MEASURED:
            self._peak.close()
            self.bytes = MPI.COMM_WORLD.allreduce(self._taken(), op=MPI.MAX)
        elif batch_idx not in COMPARED and batch_idx > 3:
            self.seconds.append(seconds)


def train(options: Any, strategy: Mapping[str, Any]) -> Steps:
    """Train some steps of the network, one way."""
    L.seed_everything(0, verbose=False)
    shape = STEPS * SAMPLES, options.context + 1
    tokens = torch.randint(options.vocabulary, shape)
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=SAMPLES)
    module = GPT(
        width=options.width,
        depth=options.depth,
        heads=4,
        context=options.context,
        vocabulary=options.vocabulary,
    )
    steps, ranks = Steps(), MPI.COMM_WORLD.size
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=AxoSparseStrategy(ranks, SAMPLES, **strategy),
        max_epochs=1,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return steps


def main() -> None:
    """Print a row for each way."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--vocabulary", type=int, default=256)
    arguments.add_argument("--width", type=int, default=192)
    arguments.add_argument("--depth", type=int, default=8)
    arguments.add_argument("--context", type=int, default=128)
    arguments.add_argument("--trials", type=int, default=5)
    arguments.add_argument("--ways", nargs="*", default=list(WAYS))
    options = arguments.parse_args()
    found: dict[str, list[Steps]] = {way: [] for way in options.ways}
    for trial in range(options.trials):
        for way in options.ways[trial % 2 :] + options.ways[: trial % 2]:
            found[way].append(train(options, WAYS[way]))
    if MPI.COMM_WORLD.rank:
        return
    medians = {way: median(s for run in runs for s in run.seconds) for way, runs in found.items()}
    first = medians[options.ways[0]]
    for way, runs in found.items():
        megabytes = max(run.bytes for run in runs) / 1e6
        print(
            f"| {MPI.COMM_WORLD.size} | {options.vocabulary} | {way} | {medians[way] * 1e3:.0f} "
            f"| {medians[way] / first:.3f} | {megabytes:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
