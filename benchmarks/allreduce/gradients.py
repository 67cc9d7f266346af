"""Compares the all-reduce of sparse gradients over MPI with DDP's dense one over gloo.

    mpiexec -n 2 python -m benchmarks.allreduce.gradients

Gradients of a model of 100 M parameters, float32, are averaged over the ranks; gloo gets them
packed in DDP's buckets of 25 MB. Prints Markdown rows.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from benchmarks.interleave import Runner, ratios, trials
from lightning_axosparse.distributed.gradient_reducer import GradientReducer, ReductionGroup
from lightning_axosparse.distributed.mpi.process_group import init_process_group
from lightning_axosparse.sparse import sparsify

WIDTH, LAYERS = 2048, 24
DDP_BUCKET = 25 * 2**20 // 4


def dense_over_gloo(gradients: torch.Tensor) -> Runner:
    group = dist.new_group(backend="gloo")

    def run(trial: int) -> None:
        buckets = gradients.split(DDP_BUCKET)
        for work in [dist.all_reduce(b, group=group, async_op=True) for b in buckets]:
            work.wait()
        gradients.div_(MPI.COMM_WORLD.size)

    return run


def reduced(model: nn.Module) -> Runner:
    reducer = GradientReducer(
        [ReductionGroup(dist.group.WORLD, list(model.parameters()))], MPI.COMM_WORLD.size
    )
    gradients = {parameter: torch.ones_like(parameter) for parameter in model.parameters()}

    def run(trial: int) -> None:
        for parameter, gradient in gradients.items():  # each separately, as backward leaves it
            parameter.grad = gradient
        reducer.prepare()
        reducer.finish()

    return run


def network(ratio: float = 0.0) -> nn.Module:
    """Return the model, with ``ratio`` of its weights pruned at random."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    if ratio:
        names = [name for name, _ in model.named_parameters()]
        sparsify(model, {name: torch.rand(WIDTH, WIDTH) > ratio for name in names})
    return model


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=9)
    count = arguments.parse_args().trials
    torch.set_num_threads(1)
    init_process_group("cpu")
    torch.manual_seed(0)
    runners = {
        "dense, gloo": dense_over_gloo(torch.ones(LAYERS * WIDTH * WIDTH)),
        "dense, ours": reduced(network()),
    }
    for ratio in (0.8, 0.9):
        runners[f"sparse {ratio}, ours"] = reduced(network(ratio))
    seconds = trials(runners, count)
    if MPI.COMM_WORLD.rank == 0:
        ours = ratios(seconds, "dense, ours")
        for name, ratio in ratios(seconds, "dense, gloo").items():
            milliseconds = np.median(seconds[name]) * 1e3
            print(f"| {name} | {milliseconds:.0f} ms | {ratio:.3f} | {ours[name]:.2f} |")


if __name__ == "__main__":
    main()
