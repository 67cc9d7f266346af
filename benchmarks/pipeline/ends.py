"""Compares training whose loss is differentiated once a batch with a declared ``loss="mean"``.

    python -m benchmarks.pipeline.ends [--ranks 4] [--vocabulary 8192]

A GPT trains on sequences of random tokens, 8 micro-batches of one sample, with one stage a rank.
Each way is a job of its own, and the jobs take turns step by step, so that a change of the
machine's load affects both. Printed are the medians of the slowest rank's seconds for a step, their
ratio to the first job's, and the largest rank's memory of a step: what is allocated at most beside
what was there before. Steps that are compared, or measured, do not count.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

WAYS: dict[str, dict[str, Any]] = {"mean": {"loss": "mean"}, "whole": {}}
SAMPLES, COMPARED = 8, (0, 1, 3, 7, 15, 31, 63)


class Turns:
    """Lets several jobs take turns, by a number in a file that they share.

    Args:
        file: of 8 bytes, at first zeros.
        own: number of this job.
    """

    def __init__(self, file: Path, own: int) -> None:
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), 8)
        self._own = own

    def wait(self) -> None:
        """Wait, asleep, until it is this job's turn."""
        while self._count() % len(WAYS) != self._own:
            time.sleep(1e-3)

    def give(self) -> None:
        """Let the next job go on."""
        self._memory[:] = (self._count() + 1).to_bytes(8, "little")

    def _count(self) -> int:
        return int.from_bytes(self._memory[:], "little")


class Steps(Callback):
    """Keeps the seconds of each step, those of the slowest rank, and the bytes of the last."""

    def __init__(self, turns: Turns, measured: int) -> None:
        self.seconds: list[float] = []
        self.bytes = 0
        self._turns, self._measured = turns, measured
        self._begin = 0.0
        self._peak = ExitStack()

    def on_train_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        """Begin to measure a step on all ranks at once."""
        # Imported by ranks alone: a process that has begun MPI cannot start their jobs.
        from mpi4py import MPI

        from benchmarks.interleave import sleeping_barrier

        self._world = MPI.COMM_WORLD
        if self._world.rank == 0:
            # Here, as what Lightning does between batches would slow the next job.
            if batch_idx:
                self._turns.give()
            self._turns.wait()
        sleeping_barrier(self._world)
        if batch_idx == self._measured:
            from lightning_axosparse.pipeline.profile import peak_bytes

            self._taken = self._peak.enter_context(peak_bytes(module.device))
        self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure the step, if it is none of those that are compared."""
        seconds = self._world.allreduce(time.perf_counter() - self._begin, max)
        if batch_idx == self._measured:
            self._peak.close()
            self.bytes = self._world.allreduce(self._taken(), max)
        elif batch_idx not in COMPARED and batch_idx > 3:
            self.seconds.append(seconds)

    def on_train_end(self, *_: Any) -> None:
        """Let the next job end, too."""
        if self._world.rank == 0:
            self._turns.give()


def train(options: argparse.Namespace) -> None:
    """Train the network in one job, and print what its steps took."""
    from lightning_axosparse import AxoSparseStrategy
    from lightning_axosparse.examples.gpt import GPT

    L.seed_everything(0, verbose=False)
    shape = options.steps * SAMPLES, options.context + 1
    tokens = torch.randint(options.vocabulary, shape)
    data = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=SAMPLES)
    module = GPT(
        width=options.width,
        depth=options.depth,
        heads=4,
        context=options.context,
        vocabulary=options.vocabulary,
    )
    steps = Steps(Turns(options.turns, list(WAYS).index(options.way)), options.steps - 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=AxoSparseStrategy(options.ranks, SAMPLES, **WAYS[options.way]),
        max_epochs=1,
        callbacks=[steps],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        options.result.write_text(json.dumps([median(steps.seconds), steps.bytes]))


def main() -> None:
    """Start a job for each way, and print a row for each."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--vocabulary", type=int, default=256)
    arguments.add_argument("--width", type=int, default=192)
    arguments.add_argument("--depth", type=int, default=8)
    arguments.add_argument("--context", type=int, default=128)
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    for name in ("--turns", "--result"):
        arguments.add_argument(name, type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.way is not None:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        start_all(options, Path(folder))


def start_all(options: argparse.Namespace, folder: Path) -> None:
    """Start all jobs, wait for them, and print their rows."""
    turns = folder / "turns"
    turns.write_bytes(bytes(8))
    running = {}
    for name in WAYS:
        command = ["mpiexec", "-n", str(options.ranks), sys.executable, "-m", __spec__.name]
        for option in ("ranks", "vocabulary", "width", "depth", "context", "steps"):
            command += [f"--{option}", str(getattr(options, option))]
        command += ["--way", name, "--turns", str(turns), "--result", str(folder / name)]
        log = (folder / f"{name}.log").open("w")
        running[name] = subprocess.Popen(command, stdout=log, stderr=log)
    for name, process in running.items():
        if process.wait():
            sys.exit((folder / f"{name}.log").read_text())
    results = {name: json.loads((folder / name).read_text()) for name in WAYS}
    first = next(iter(results.values()))[0]
    for name, (seconds, size) in results.items():
        megabytes = f"{size / 1e6:.0f}" if size else ""
        print(
            f"| {options.ranks} | {options.vocabulary} | {name} | {seconds * 1e3:.0f} "
            f"| {seconds / first:.3f} | {megabytes} |"
        )


if __name__ == "__main__":
    main()
