"""Compares the engine with the original message-driven one, axonn 0.1.0 from PyPI.

    pip install -c constraints.txt -e '.[bench]'
    mpiexec -n 2 python -m benchmarks.pipeline.axonn_peer blocks
    mpiexec -n 4 python -m benchmarks.pipeline.axonn_peer sleep

"blocks": the transformer blocks and the data of ``peers``; gradients are compared with those of one
process before any timing. "sleep": the stages of ``schedules`` with jitter of sigma 0.6. axonn runs
as published, at its own in-flight limit, the number of stages; its CUDA calls are redirected to the
CPU.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

from benchmarks.interleave import Runner, ratios, trials
from benchmarks.pipeline import peers, schedules
from benchmarks.pipeline.table import head, row
from lightning_axosparse.distributed.mpi.transport import connect_stages
from lightning_axosparse.examples.gpt import Block
from lightning_axosparse.pipeline.crossing.message import ChannelLink
from lightning_axosparse.pipeline.schedule import SCHEDULES

try:
    from axonn import axonn, communication
except ImportError as missing:
    raise SystemExit("axonn is missing: pip install -c constraints.txt -e '.[bench]'") from missing

THEIRS = "axonn 0.1.0"
TOKENS = 128


class Shard(nn.Module):
    """One stage with axonn's interface: it has the shapes of its messages, -1 for the samples."""

    def __init__(self, layers: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers, self._shape = layers, [-1, *shape]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def get_input_shape(self) -> list[int]:
        return self._shape

    def get_output_shape(self) -> list[int]:
        return self._shape


def start_axonn(shard: Shard, microbatches: int) -> None:
    """Initialise axonn with all ranks as one pipeline, fp32, one sample per micro-batch."""
    world = MPI.COMM_WORLD
    axonn.torch = communication.torch = _torch_on_cpu()
    # Its fp32 path calls a method by a name that does not exist.
    communication.communication_handle.all_reduce = communication.communication_handle.allreduce
    with mock.patch("builtins.print"):
        axonn.init(G_inter=world.size, G_data=1, gpus_per_node=world.size)
    data = torch.utils.data.TensorDataset(torch.zeros(microbatches, 1))
    axonn.create_dataloader(data, microbatches, 1)  # sets both sizes
    optimizer = torch.optim.SGD(shard.parameters(), 1e-3)
    axonn.register_model_and_optimizer(shard, optimizer)
    axonn.register_loss_fn(peers.loss_of)
    # The gradients are views of one buffer that axonn leaves uninitialized.
    optimizer.zero_grad(set_to_none=False)


def _torch_on_cpu() -> SimpleNamespace:
    """Return a stand-in for the torch module whose CUDA calls run on the CPU."""
    fake = SimpleNamespace(**vars(torch))
    fake.cuda = SimpleNamespace(set_device=lambda index: None, synchronize=lambda: None)
    fake.empty = lambda *size, device, **options: torch.empty(*size, **options)
    fake.distributed = SimpleNamespace(**vars(dist))
    fake.distributed.new_group = lambda ranks, backend: dist.new_group(ranks)
    return fake


class Sleeper(nn.Module):
    """A stage of sleeping passes for axonn, which runs micro-batches in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._forwards: Iterator[float] = iter(())
        self._backwards: Iterator[float] = iter(())

    def prepare(self, trial: int, sigma: float) -> None:
        world = MPI.COMM_WORLD
        table = schedules.delays(sigma, trial, world.size)[:, world.rank]
        self._forwards, self._backwards = map(iter, table)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(next(self._forwards))
        return _SleepBackward.apply(x * self.weight, self._backwards)


class _SleepBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, seconds: Iterator[float]) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(next(context.seconds))
        return gradient, None


def blocks() -> dict[str, Runner]:
    """Return runners of the blocks of ``peers``, after a check of their gradients."""
    world = MPI.COMM_WORLD
    torch.manual_seed(0)
    layers = [Block(peers.WIDTH, peers.HEADS, 0.0) for _ in range(peers.BLOCKS)]
    x, y = torch.randn(2, peers.MICROBATCHES, TOKENS, peers.WIDTH)
    count = peers.BLOCKS // world.size
    stage = nn.Sequential(*layers[world.rank * count : (world.rank + 1) * count])
    our_stage, shard = copy.deepcopy(stage), Shard(copy.deepcopy(stage), (TOKENS, peers.WIDTH))
    start_axonn(shard, peers.MICROBATCHES)
    mailboxes = connect_stages(world.rank, world.size, 0, peers.MICROBATCHES, torch.device("cpu"))
    link = ChannelLink(*mailboxes, torch.device("cpu"))
    ours = peers.Ours(our_stage, SCHEDULES["message-driven"], 2 * world.size, link, nullcontext)

    for part_x, part_y in zip(x.split(1), y.split(1), strict=True):
        (peers.loss_of(nn.Sequential(*layers)(part_x), part_y) / peers.MICROBATCHES).backward()
    ours(x, y)
    axonn.run_batch(x, y)
    assert difference(our_stage, stage) == 0, "gradients are not those of one process"
    theirs = world.allreduce(difference(shard.layers, stage), op=MPI.MAX)
    if world.rank == 0:
        print(f"Gradients differ from one process's by 0 (ours) and {theirs:.1e} ({THEIRS}).\n")
    return {THEIRS: lambda trial: axonn.run_batch(x, y), "limit 2P": lambda trial: ours(x, y)}


def difference(module: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two modules' gradients, relative to the largest gradient."""
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (module, other)]
    return float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())


def sleep() -> dict[str, Runner]:
    """Return runners of sleeping stages with jitter."""
    world = MPI.COMM_WORLD
    case = next(case for case in schedules.CASES if case.sigma == 0.6)
    sleeper = Sleeper()
    start_axonn(Shard(sleeper, (64,)), schedules.MICROBATCHES)
    x, y = torch.zeros(2, schedules.MICROBATCHES, 64)

    def theirs(trial: int) -> None:
        sleeper.prepare(trial, case.sigma)
        axonn.run_batch(x, y)

    ours_2p = schedules.Choice(SCHEDULES["message-driven"], 2 * world.size)
    ours = schedules.SleepingStage().runner(ours_2p, case)
    return {THEIRS: theirs, "limit 2P": ours}


CASES = {
    "blocks": ("8 GPT blocks", 1.00, blocks),
    "sleep": ("sleeping stages, sigma 0.6", 0.90, sleep),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("case", choices=CASES)
    arguments.add_argument("--trials", type=int, default=15)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    peers.connect_gloo()
    world = MPI.COMM_WORLD
    name, bar, prepare = CASES[options.case]
    seconds = trials(prepare(), options.trials)
    if world.rank == 0:
        head()
        for runner, ratio in ratios(seconds, THEIRS).items():
            bound = None if runner == THEIRS else bar
            row(f"{name}, {world.size} ranks", runner, median(seconds[runner]), ratio, bound)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
