"""Compares the engine over MPI with torch.distributed.pipelining's 1F1B over gloo.

    mpiexec -n 2 python -m benchmarks.pipeline.peers

All run the same transformer blocks and micro-batches in the same job, also torch's zero-bubble
schedules and, where it is installed, DeepSpeed's engine. The engine runs products by oneDNN where
the strategy does, unless ``--own-products`` is given. Before any timing, gradients are compared
with those of one process; those of the engine and of torch's 1F1B to the bit. Every row of the
engine also has the step that is simulated from the times of the stages' passes without waiting.
Prints Markdown rows.
"""

from __future__ import annotations

import argparse
import copy
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.interleave import ratios, trials
from benchmarks.pipeline.alone import Alone, ReadyLink
from benchmarks.pipeline.deepspeed_peer import IS_INSTALLED, DeepSpeed
from benchmarks.pipeline.table import head, row
from lightning_axosparse.distributed.mpi import transport
from lightning_axosparse.examples.gpt import Block
from lightning_axosparse.pipeline import engine
from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    ChannelLink,
    Gradients,
    Link,
    Message,
)
from lightning_axosparse.pipeline.engine import StageRun
from lightning_axosparse.pipeline.schedule import SCHEDULES, Schedule
from lightning_axosparse.support.dense_products import onednn_is_faster, without_mkl

WIDTH, HEADS, BLOCKS, MICROBATCHES = 256, 8, 8, 8
Products = Callable[[], AbstractContextManager[None]]


BASELINE = "torch 1F1B, gloo"
PEERS = {
    BASELINE: Schedule1F1B,
    "torch interleaved zero bubble, gloo": ScheduleInterleavedZeroBubble,
    "torch ZBV, gloo": ScheduleZBVZeroBubble,
}


def connect_gloo() -> None:
    world = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = world.bcast(probe.getsockname()[1])
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.size
    )


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def validate(module: nn.Module, reference: nn.Module, exactly: bool) -> None:
    """Check gradients against those of one process, to the bit or to a few of them."""
    for ours, alone in zip(module.parameters(), reference.parameters(), strict=True):
        tolerances = {"rtol": 0.0, "atol": 0.0} if exactly else {}
        torch.testing.assert_close(ours.grad, alone.grad, **tolerances)


class Passes:
    """The passes of one stage; the first has inputs, the last has targets."""

    def __init__(
        self,
        layers: nn.Module,
        inputs: Sequence[Tensor] | None,
        targets: Sequence[Tensor] | None,
    ) -> None:
        self._layers, self._inputs, self._targets = layers, inputs, targets

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        if received is None:
            assert self._inputs is not None
            output = self._layers(self._inputs[microbatch])
        else:
            output = self._layers(received.content.output)
        if self._targets is not None:
            output = loss_of(output, self._targets[microbatch]) / MICROBATCHES
        return Activation(output)

    def backward(
        self, microbatch: int, sent: Sequence[Tensor], gradients: Gradients | None
    ) -> float:
        torch.autograd.backward(sent, gradients and gradients.tensors)
        return 1.0


class Ours:
    """One stage in the message-driven engine, or in a static order of it."""

    def __init__(
        self,
        layers: nn.Module,
        schedule: type[Schedule],
        limit: int,
        link: Link,
        products: Products,
    ) -> None:
        self._layers, self._schedule, self._limit, self._link = layers, schedule, limit, link
        self._products = products

    def __call__(self, x: Tensor, y: Tensor) -> None:
        stage, stages = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        inputs, targets = x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)

        decides = self._schedule(stage, stages, MICROBATCHES, self._limit)
        passes = Passes(
            self._layers,
            inputs if stage == 0 else None,
            targets if stage == stages - 1 else None,
        )
        with self._products():
            engine.run([StageRun(decides, self._link, passes)])


class Torch:
    """The stages of this rank in a schedule of torch."""

    def __init__(self, blocks: Sequence[nn.Module], schedule: Any, places: Sequence[int]) -> None:
        self.blocks = nn.ModuleList(copy.deepcopy(nn.ModuleList(blocks[i] for i in places)))
        world = MPI.COMM_WORLD
        # A rank of a schedule with several stages has two.
        each = 1 if schedule is Schedule1F1B else 2
        size, count = len(places) // each, each * world.size
        stages = [
            PipelineStage(
                nn.Sequential(*self.blocks[first : first + size]),
                places[first] // size,
                count,
                torch.device("cpu"),
            )
            for first in range(0, len(places), size)
        ]
        self._first, self._last = (
            any(stage.stage_index == index for stage in stages) for index in (0, count - 1)
        )
        own = stages[0] if each == 1 else stages
        self._schedule = schedule(own, MICROBATCHES, loss_fn=loss_of)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        arguments = (x,) if self._first else ()
        self._schedule.step(*arguments, **({"target": y} if self._last else {}))


def own_places(schedule: Any) -> list[int]:
    """The blocks of this rank in a schedule of torch, in the order of its stages."""
    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if schedule is Schedule1F1B:
        indices, size = [rank], BLOCKS // ranks
    else:
        # The second stage is a V back, or as many stages on as there are ranks.
        second = 2 * ranks - 1 - rank if schedule is ScheduleZBVZeroBubble else ranks + rank
        indices, size = [rank, second], BLOCKS // ranks // 2
    return [index * size + place for index in indices for place in range(size)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--trials", type=int, default=15)
    arguments.add_argument("--tokens", type=int, default=128, help="of a sample")
    arguments.add_argument("--samples", type=int, default=1, help="of a micro-batch")
    arguments.add_argument("--own-products", action="store_true", help="torch's, in the engine too")
    arguments.add_argument("--apart", action="store_true", help="messages as between nodes")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    if BLOCKS % world.size:
        raise SystemExit(
            f"{BLOCKS} blocks cannot be split evenly over {world.size} ranks: use 2 or 4."
        )
    connect_gloo()
    torch.manual_seed(0)
    blocks = [Block(WIDTH, HEADS, 0.0) for _ in range(BLOCKS)]
    x, y = torch.randn(2, MICROBATCHES * options.samples, options.tokens, WIDTH)
    count = BLOCKS // world.size
    mine = nn.Sequential(*blocks[world.rank * count : (world.rank + 1) * count])
    if options.apart:  # Keep blocks out of shared memory, as between nodes.
        transport.shares_memory = lambda comm, peer: False
    boxes = transport.connect_stages(world.rank, world.size, 0, MICROBATCHES, torch.device("cpu"))
    link = ChannelLink(*boxes, torch.device("cpu"))
    choices = {
        "1F1B, ours": (SCHEDULES["1f1b"], world.size),
        "message-driven": (SCHEDULES["message-driven"], 2 * world.size),
    }
    theirs = {
        name: Torch(blocks, schedule, own_places(schedule)) for name, schedule in PEERS.items()
    }
    deepspeed = {}
    if IS_INSTALLED:
        peer = DeepSpeed(blocks, MICROBATCHES, options.samples, loss_of)
        deepspeed["DeepSpeed, gloo"] = peer
    faster = onednn_is_faster(parameter.shape for parameter in mine.parameters())
    products: Products = without_mkl if faster and not options.own_products else nullcontext
    ours = {
        name: Ours(copy.deepcopy(mine), *choice, link, products) for name, choice in choices.items()
    }
    steps = theirs | deepspeed | ours

    def one_process() -> None:
        nn.ModuleList(blocks).zero_grad()
        for part_x, part_y in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            (loss_of(nn.Sequential(*blocks)(part_x), part_y) / MICROBATCHES).backward()

    for step in steps.values():
        step(x, y)
    with products():
        one_process()
    for step in ours.values():
        validate(step._layers, mine, exactly=True)
    one_process()
    for name, step in theirs.items():
        reference = nn.ModuleList(blocks[place] for place in own_places(PEERS[name]))
        validate(step.blocks, reference, exactly=name == BASELINE)
    for step in deepspeed.values():
        validate(step.blocks, mine, exactly=False)

    def runner(step: Any) -> Any:
        return lambda trial: step(x, y)

    ready = ReadyLink(x[: options.samples])
    lone = Ours(copy.deepcopy(mine), *choices["message-driven"], ready, products)
    alone = Alone(lambda: lone(x, y), MICROBATCHES)
    runners = {name: runner(step) for name, step in steps.items()}
    seconds = trials(runners | {"alone": alone}, options.trials)
    del seconds["alone"]
    predicted = {name: alone.predict(*choice) for name, choice in choices.items()}
    if world.rank == 0:
        kilobytes = options.samples * options.tokens * WIDTH * 4 / 1e3
        crowded = world.size > len(os.sched_getaffinity(0))
        large = kilobytes >= 500
        bars = {"message-driven": 0.97 if crowded else 0.92 if large else 1.0}
        case = f"8 GPT blocks, {world.size} ranks, {kilobytes:.0f} kB"
        head()
        for name, ratio in ratios(seconds, BASELINE).items():
            # The simulator does not model ranks that share cores.
            guess = median(predicted[name]) if name in predicted and not crowded else None
            row(case, name, median(seconds[name]), ratio, bars.get(name), guess)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
