"""Compares the message-driven schedule with 1F1B on the same transport, with sleeping stages.

    mpiexec -n 4 python -m benchmarks.pipeline.schedules [--forward 0.05]

Sleeping stages hardly use the CPU, so every schedule gets exactly the same jitter and link latency,
even on a machine with fewer cores than stages. Every row also has the simulated step of the same
schedule and passes. The simulator gets two numbers, the overhead of a pass and of a message, both
measured with 1F1B in the first case. Prints Markdown rows.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from benchmarks.interleave import Runner, ratios, trials
from benchmarks.pipeline.table import head, row
from lightning_axosparse.distributed.mpi.transport import connect_stages
from lightning_axosparse.pipeline import engine
from lightning_axosparse.pipeline.crossing.message import Activation, ChannelLink, Message
from lightning_axosparse.pipeline.engine import StageRun
from lightning_axosparse.pipeline.schedule import SCHEDULES, Schedule
from lightning_axosparse.planning.simulate import Wire, simulate
from lightning_axosparse.support.trace import Span, clock

BACKWARD = 2.0  # in forward passes
MICROBATCHES = 16
NOISE = 0.01  # difference of two runs of the same passes on an idle machine
STILL = dict.fromkeys(("limit P", "limit 2P", "limit M"), 1 + NOISE)


def moving(bar: float) -> dict[str, float]:
    """Return the bars of a case with jitter or latency: near 1 without slack, this one with it."""
    return {"limit P": 1.03, "limit 2P": bar}


class Case(NamedTuple):
    """Standard deviation of the logarithm of a pass, latency in forward passes, bars of ratios."""

    name: str
    sigma: float
    latency: float
    bars: dict[str, float]


CASES = [
    Case("no jitter, no latency", 0.0, 0.0, STILL),
    Case("jitter, sigma 0.3", 0.3, 0.0, moving(0.92)),
    Case("jitter, sigma 0.6", 0.6, 0.0, moving(0.89)),
    Case("jitter, sigma 1.0", 1.0, 0.0, moving(0.87)),
    Case("latency 0.5 forward", 0.0, 0.5, moving(0.86)),
    Case("latency 1 forward", 0.0, 1.0, moving(0.76)),
    Case("latency 2 forward", 0.0, 2.0, moving(0.65)),
]


class SlowLink(ChannelLink):
    """A link whose messages can be used only some time after they were sent."""

    def __init__(self, *ends: Any) -> None:
        super().__init__(*ends)
        self.activations, self.gradients = _Ripe(), _Ripe()

    def send_activation(self, tree: Any) -> Sequence[Tensor]:
        return super().send_activation((tree, time.time()))

    def send_gradient(self, tree: Any) -> None:
        super().send_gradient((tree, time.time()))


class _Ripe(deque):
    """A queue that shows only messages that were sent longer ago than the latency."""

    latency = 0.0

    def __len__(self) -> int:
        now = time.time()
        return sum(message.content[1] + _Ripe.latency <= now for message in self)

    def popleft(self) -> Message:
        message = super().popleft()
        return message._replace(content=message.content[0])


def delays(sigma: float, trial: int, stages: int) -> np.ndarray:
    """Forward passes that each pass takes, shape (2, stages, microbatches): lognormal."""
    noise = np.random.default_rng(1000 + trial).lognormal(
        -(sigma**2) / 2, sigma, (2, stages, MICROBATCHES)
    )
    return noise * np.array([1.0, BACKWARD])[:, None, None]


class SleepingPasses:
    """Passes that take so many seconds for each micro-batch."""

    def __init__(self, forward: np.ndarray, backward: np.ndarray) -> None:
        self._forward, self._backward = forward, backward
        self._message = torch.zeros(64, requires_grad=True)

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        time.sleep(self._forward[microbatch])
        return Activation(self._message)

    def backward(self, microbatch: int, sent: Any, gradients: Any) -> float:
        time.sleep(self._backward[microbatch])
        return 1.0


class Choice(NamedTuple):
    """A schedule and its in-flight limit."""

    schedule: type[Schedule]
    limit: int


class SleepingStage:
    """This rank's stage, which sleeps through its passes.

    Args:
        forward: seconds of a forward pass.

    Attributes:
        recorded: the spans of every step run, in order, while ``recording``.
    """

    def __init__(self, forward: float) -> None:
        world = MPI.COMM_WORLD
        self.stage, self.stages = world.rank, world.size
        self._forward = forward
        self.recorded: list[list[Span]] = []
        mailboxes = connect_stages(self.stage, self.stages, 0, 2 * self.stages, torch.device("cpu"))
        self._link = SlowLink(*mailboxes, torch.device("cpu"))

    def step(self, choice: Choice, case: Case, trial: int) -> None:
        """Run the passes of one step in the order of the schedule."""
        _Ripe.latency = case.latency * self._forward
        seconds = self._forward * delays(case.sigma, trial, self.stages)
        decides = choice.schedule(self.stage, self.stages, MICROBATCHES, choice.limit)
        passes = SleepingPasses(*seconds[:, self.stage])
        engine.run([StageRun(decides, self._link, passes)])

    def runner(self, choice: Choice, case: Case) -> Runner:
        return lambda trial: self.step(choice, case, trial)

    def recorded_runner(self, choice: Choice, case: Case) -> Runner:
        def run(trial: int) -> None:
            clock.start_recording()
            self.step(choice, case, trial)
            self.recorded.append(clock.stop_recording())

        return run


class Overhead(NamedTuple):
    """Seconds of a pass beyond its sleep, and seconds of a message."""

    a_pass: float
    a_message: float


def overhead(ranks: list[list[Span]], forward: float) -> Overhead:
    """Return the means over one step without jitter, from the spans of all ranks.

    Args:
        ranks: the spans of each rank.
        forward: seconds of a forward pass.
    """
    passes, messages = [], []
    ended = {
        (span.activity, span.stage, span.microbatch): span.end for spans in ranks for span in spans
    }
    for spans in ranks:
        waited = sum(span.end - span.start for span in spans if span.activity == "wait")
        busy = spans[-1].end - spans[0].start - waited
        passes.append((busy / MICROBATCHES - forward * (1 + BACKWARD)) / 2)
        for before, span in pairwise(spans):
            if before.activity == "wait":
                sender = span.stage + (1 if span.activity == "backward" else -1)
                messages.append(span.start - ended[span.activity, sender, span.microbatch])
    return Overhead(fmean(passes), fmean(messages))


def simulated(choice: Choice, case: Case, trial: int, seconds: float, costs: Overhead) -> float:
    """Return the seconds of the simulated step, of which a forward pass takes so many."""
    stages = MPI.COMM_WORLD.size
    forward, backward = seconds * delays(case.sigma, trial, stages)
    return simulate(
        [choice.schedule(index, stages, MICROBATCHES, choice.limit) for index in range(stages)],
        forward + costs.a_pass,
        backward + costs.a_pass,
        # The latency counts from the time of sending, so it includes the transfer.
        Wire(latency=max(case.latency * seconds, costs.a_message)),
    ).makespan


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=7)
    arguments.add_argument("--forward", type=float, default=0.01, help="seconds of a forward pass")
    places = range(len(CASES))
    arguments.add_argument(
        "--cases", type=int, nargs="+", choices=places, default=places, help="besides the first"
    )
    options = arguments.parse_args()
    count = options.trials
    world = MPI.COMM_WORLD
    forward = options.forward
    mine, stages = SleepingStage(forward), world.size
    runners = {
        "1F1B": Choice(SCHEDULES["1f1b"], stages),
        "limit P": Choice(SCHEDULES["message-driven"], stages),
        "limit 2P": Choice(SCHEDULES["message-driven"], 2 * stages),
        "limit M": Choice(SCHEDULES["message-driven"], MICROBATCHES),
    }
    if world.rank == 0:
        head()
    for case in [CASES[place] for place in sorted({0, *options.cases})]:
        run = {name: mine.runner(choice, case) for name, choice in runners.items()}
        if case is CASES[0]:
            run["1F1B"] = mine.recorded_runner(runners["1F1B"], case)
        seconds = trials(run, count)
        if case is CASES[0]:
            steps = zip(*world.allgather(mine.recorded), strict=True)
            measured = [overhead(spans, forward) for spans in steps]
            costs = Overhead(*map(fmean, zip(*measured, strict=True)))
        if world.rank == 0:
            for name, ratio in ratios(seconds, "1F1B").items():
                choice = runners[name]
                guess = median(simulated(choice, case, n, forward, costs) for n in range(count))
                row(case.name, name, median(seconds[name]), ratio, case.bars.get(name), guess)
    if world.rank == 0:
        a_pass, a_message = (cost * 1e3 for cost in costs)
        print(f"\nA pass took {a_pass:.2f} ms more than its sleep, a message {a_message:.2f} ms.")


if __name__ == "__main__":
    main()
