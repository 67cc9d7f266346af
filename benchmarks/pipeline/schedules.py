"""Message-driven against static 1F1B on the same transport, with stages that sleep.

    mpiexec -n 4 python -m benchmarks.pipeline.schedules

Sleeping stages hardly need the CPU, so jitter and link latency can be dealt out exactly, the same
to every schedule, on a machine with fewer cores than stages. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from benchmarks.interleave import ratios, trials
from lightning_axosparse.mpi.transport import neighbours
from lightning_axosparse.pipeline import engine
from lightning_axosparse.pipeline.engine import StageEngine
from lightning_axosparse.pipeline.link import MailboxLink
from lightning_axosparse.pipeline.schedule import SCHEDULES

FORWARD, BACKWARD = 0.010, 0.020
MICROBATCHES = 16
CASES = {
    "no jitter, no latency": (0.0, 0.0),
    "jitter, sigma 0.3": (0.3, 0.0),
    "jitter, sigma 0.6": (0.6, 0.0),
    "jitter, sigma 1.0": (1.0, 0.0),
    "latency 0.5 forward": (0.0, 0.5),
    "latency 1 forward": (0.0, 1.0),
    "latency 2 forward": (0.0, 2.0),
}


class SlowLink(MailboxLink):
    """A link whose messages can be used only some time after they were sent."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.activations, self.gradients = _Ripe(), _Ripe()

    def send_activation(self, tree: Any) -> None:
        super().send_activation((tree, time.time()))

    def send_gradient(self, tree: Any) -> None:
        super().send_gradient((tree, time.time()))


class _Ripe(deque):
    """A queue that shows only what was sent longer ago than the latency."""

    latency = 0.0

    def __len__(self) -> int:
        now = time.time()
        return sum(sent + _Ripe.latency <= now for _, sent in self)

    def popleft(self) -> Any:
        return super().popleft()[0]


def delays(sigma: float, trial: int, stages: int) -> np.ndarray:
    """Seconds of each pass, shape (2, stages, microbatches): lognormal with mean one."""
    noise = np.random.default_rng(1000 + trial).lognormal(
        -(sigma**2) / 2, sigma, (2, stages, MICROBATCHES)
    )
    return noise * np.array([FORWARD, BACKWARD])[:, None, None]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=7)
    count = arguments.parse_args().trials
    world = MPI.COMM_WORLD
    stage, stages = world.rank, world.size
    link = SlowLink(*neighbours(stage, stages, 0, 2 * stages), torch.device("cpu"))

    def runner(schedule: str, limit: int, sigma: float) -> Any:
        def run(trial: int) -> None:
            table = delays(sigma, trial, stages)
            message = torch.zeros(64, requires_grad=True)

            def compute(microbatch: int, received: Any) -> Any:
                time.sleep(table[0, stage, microbatch])
                return message

            def differentiate(microbatch: int, output: Any, gradients: Any) -> None:
                time.sleep(table[1, stage, microbatch])

            decides = SCHEDULES[schedule](stage, stages, MICROBATCHES, limit)
            engine.run([StageEngine(stage, stages, decides, link, compute, differentiate)])

        return run

    if world.rank == 0:
        print("| case | 1F1B | limit P | limit 2P | limit M |\n| --- | --: | --: | --: | --: |")
    for case, (sigma, latency) in CASES.items():
        _Ripe.latency = latency * FORWARD
        seconds = trials(
            {
                "1f1b": runner("1f1b", stages, sigma),
                "P": runner("message-driven", stages, sigma),
                "2P": runner("message-driven", 2 * stages, sigma),
                "M": runner("message-driven", MICROBATCHES, sigma),
            },
            count,
        )
        if world.rank == 0:
            ratio = ratios(seconds, "1f1b")
            step = np.median(seconds["1f1b"]) * 1e3
            shown = " | ".join(f"{ratio[name]:.3f}" for name in ("P", "2P", "M"))
            print(f"| {case} | {step:.0f} ms | {shown} |", flush=True)


if __name__ == "__main__":
    main()
