"""Measures how much of the gradients' all-reduce overlaps with the backward pass.

    mpiexec -n 2 python -m benchmarks.allreduce.overlap

A step is the forward and backward pass of the model of `gradients`, without the optimizer: with no
all-reduce, with all of it after backward, and with each bucket sent as soon as its gradients are
final. "left" is the time from the end of the last rank's backward to the last average; "step" is
the whole time, which on a CPU includes the sums that began earlier. Prints Markdown rows.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.allreduce.gradients import WIDTH, network
from benchmarks.interleave import Runner, sleeping_barrier, trials
from lightning_axosparse.distributed.gradient_reducer import GradientReducer, ReductionGroup
from lightning_axosparse.distributed.mpi.process_group import init_process_group

Sent = Literal["never", "after backward", "when final"]


def step(
    model: nn.Module, reducer: GradientReducer, inputs: Tensor, sent: Sent, left: list[float]
) -> Runner:
    """Return a runner that also records the time of the all-reduce after the backward pass."""

    def run(trial: int) -> None:
        model.zero_grad()
        if sent == "when final":
            reducer.prepare()
        model(inputs).sum().backward()
        sleeping_barrier(MPI.COMM_WORLD)
        start = time.perf_counter()
        if sent == "after backward":
            reducer.prepare()
        if sent != "never":
            reducer.finish()
        left.append(time.perf_counter() - start)

    return run


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=9)
    arguments.add_argument("--tokens", type=int, default=128)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    init_process_group("cpu")
    torch.manual_seed(0)
    kinds: tuple[Sent, ...] = ("never", "after backward", "when final")
    inputs = torch.randn(options.tokens, WIDTH)
    runners: dict[str, Runner] = {}
    left: dict[str, list[float]] = {}
    for ratio in (0.0, 0.8, 0.9):
        model = network(ratio)
        group = ReductionGroup(dist.group.WORLD, list(model.parameters()))
        reducer = GradientReducer([group], MPI.COMM_WORLD.size)
        for kind in kinds:
            name = f"{ratio} {kind}"
            runners[name] = step(model, reducer, inputs, kind, left.setdefault(name, []))
    seconds = trials(runners, options.trials)
    if MPI.COMM_WORLD.rank:
        return
    for ratio in (0.0, 0.8, 0.9):
        steps = [median(seconds[f"{ratio} {kind}"]) * 1e3 for kind in kinds]
        after, early = (median(left[f"{ratio} {kind}"][1:]) * 1e3 for kind in kinds[1:])
        print(
            f"| {ratio:.0%} | {after:.1f} ms | {early:.1f} ms | {1 - early / after:.0%} "
            f"| {steps[0]:.0f} ms | {steps[1]:.0f} ms | {steps[2]:.0f} ms |"
        )


if __name__ == "__main__":
    main()
