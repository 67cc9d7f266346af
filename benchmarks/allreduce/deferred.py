"""Measures the all-reduce of a pipeline whose schedule defers weight gradients.

    python -m benchmarks.allreduce.deferred

Two stages x two replicas train transformer blocks, a thread a rank, with weight gradients made in
the backward passes and with deferred ones, in alternating runs of a Trainer. "started" is the share
of a step's gradient bytes whose all-reduce started before the last pass of the rank ended, "ahead"
how long before that end the first bucket started, "left" the time from there to the last average.
Numbers are medians over steps, and means over the ranks of a stage. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.allreduce.step import WARM_UP, Blocks
from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed import gradient_reducer
from lightning_axosparse.support import trace

Way = Literal["together", "deferred"]
STAGES, REPLICAS = 2, 2
PASSES = ("backward", "weight gradient")


class Starts(L.Callback):
    """Writes what the all-reduce of each step did on this rank to a file of a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._buckets: list[tuple[float, int]] = []
        self._steps: list[dict[str, float]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note every bucket's start from now on."""
        start = gradient_reducer._Bucket.pack_and_start

        def noted(bucket: Any, *arguments: Any) -> int:
            began = trace.now()
            size = start(bucket, *arguments)
            self._buckets.append((began, size))
            return size

        gradient_reducer._Bucket.pack_and_start = noted  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        """Record the passes of the step."""
        self._buckets = []
        trace.clock.record()

    def on_train_batch_end(self, *_: Any) -> None:
        """Compare them with the starts."""
        spans = trace.clock.recorded()
        last = max(span.end for span in spans if span.activity in PASSES)
        reduced = max(span.end for span in spans if span.activity == "all-reduce")
        every = sum(size for _, size in self._buckets)
        early = sum(size for began, size in self._buckets if began < last)
        ahead = last - min(began for began, _ in self._buckets)
        whole = spans[-1].end - spans[0].start
        measured = {"started": early / every, "ahead": ahead, "left": reduced - last, "step": whole}
        self._steps.append(measured)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the medians."""
        steps = self._steps[WARM_UP:]
        medians = {name: median(step[name] for step in steps) for name in steps[0]}
        stage = trainer.global_rank % STAGES
        path = Path(self._folder) / f"{trainer.global_rank}.json"
        path.write_text(json.dumps({"stage": stage, **medians}))


def run(way: Way, folder: str, options: argparse.Namespace) -> None:
    """Train some steps in one way."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    steps = options.steps + WARM_UP
    data = list(torch.randn(steps * 16, options.tokens, options.width))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=STAGES * REPLICAS,
        strategy=AxoSparseStrategy(g_inter=STAGES, microbatches=4, schedule=way),
        max_steps=steps,
        callbacks=[Starts(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Blocks(options.width, options.depth), DataLoader(data, batch_size=8))  # type: ignore[arg-type]


def measured(way: Way, given: list[str]) -> list[dict[str, float]]:
    """Return the medians of each rank in one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--run", way, "--folder", folder, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        return [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--depth", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=128, help="of each sample")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--trials", type=int, default=5)
    arguments.add_argument("--run", choices=get_args(Way), help=argparse.SUPPRESS)
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.run:
        run(options.run, options.folder, options)
        return
    given = [
        word
        for name in ("width", "depth", "tokens", "steps")
        for word in (f"--{name}", str(getattr(options, name)))
    ]
    ways: tuple[Way, ...] = get_args(Way)
    found: dict[Way, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(options.trials):
        for way in ways:
            found[way] += measured(way, given)
    print("| stage | weight gradients | started | ahead | left | step |")
    print("| --: | --- | --: | --: | --: | --: |")
    for stage in range(STAGES):
        for way, ranks in found.items():
            here = [rank for rank in ranks if rank["stage"] == stage]
            share, *rest = (
                fmean(rank[name] for rank in here) for name in ("started", "ahead", "left", "step")
            )
            cells = [f"{share:.0%}", *(f"{1e3 * value:.0f} ms" for value in rest)]
            print(f"| {stage} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
