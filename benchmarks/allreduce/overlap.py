"""How much of the gradients' all-reduce hides behind the backward pass that makes them.

    mpiexec -n 2 python -m benchmarks.allreduce.overlap

A step is forward and backward of the model of `gradients`, without the optimizer: with no
all-reduce, with all of it after backward, and with each bucket sent as soon as its gradients are
final. What a step takes longer than the first is exposed. Prints Markdown rows.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.allreduce.gradients import WIDTH, network
from benchmarks.interleave import Runner, trials
from lightning_axosparse.mpi.backend import init_process_group
from lightning_axosparse.reduce import GradientReducer, Share

Sent = Literal["never", "after backward", "when final"]


def step(model: nn.Module, reducer: GradientReducer, inputs: Tensor, sent: Sent) -> Runner:
    def run(trial: int) -> None:
        model.zero_grad()
        if sent == "when final":
            reducer.arm()
        model(inputs).sum().backward()
        if sent == "after backward":
            reducer.arm()
        if sent != "never":
            reducer.finish()

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
    runners = {}
    for ratio in (0.0, 0.8, 0.9):
        model = network(ratio)
        share = Share(dist.group.WORLD, list(model.parameters()))
        reducer = GradientReducer([share], MPI.COMM_WORLD.size)
        for kind in kinds:
            runners[f"{ratio} {kind}"] = step(model, reducer, inputs, kind)
    seconds = trials(runners, options.trials)
    if MPI.COMM_WORLD.rank:
        return
    for ratio in (0.0, 0.8, 0.9):
        alone, after, early = (median(seconds[f"{ratio} {kind}"]) * 1e3 for kind in kinds)
        exposed, left = after - alone, early - alone
        print(
            f"| {ratio:.0%} | {alone:.0f} ms | {exposed:.0f} ms | {left:.0f} ms "
            f"| {1 - left / exposed:.0%} |"
        )


if __name__ == "__main__":
    main()
