"""Moves a run to shorter pipelines and more replicas once a ticket was drawn.

Tensors are sent one at a time, from a rank that has it straight to those that need it: no rank ever
holds more than what it kept, what it is going to keep, and one tensor with its optimizer state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import time
from typing import Literal, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.grid import Grid, divisors
from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.pipeline.choice import InFlightRule
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.pipeline.shard.sharding import ReshardedTensor, Sharding
from lightning_axosparse.pipeline.shard.transfer import Transfer
from lightning_axosparse.sparse.module.parameters import state_bytes
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.train_step import StepRunner
from lightning_axosparse.support.memory import release_freed_memory
from lightning_axosparse.support.torch_internals import tensors_in
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds and may hold, in bytes.

    Attributes:
        layers: model state of each layer on this rank, by the layer's index.
        outside: model state outside the layers, which every stage has.
        activations: what a micro-batch keeps in these layers between forward and backward.
        free: what the rank may still allocate.
    """

    layers: Mapping[int, int]
    outside: int
    activations: int
    free: int

    @property
    def total(self) -> int:
        """What model state and micro-batches may take together."""
        return self.free + self.outside + sum(self.layers.values())


def measure_memory(
    stage_module: StageModule, optimizers: Sequence[Optimizer], activations: int, free: int
) -> RankMemory:
    """Count the bytes of this rank's layers; the optimizers have stepped, so have state."""
    layers, parts = stage_module.layers.layers, stage_module.layers.parts
    own = [index for stage in stage_module.stages for index in parts[stage]]
    inside = {parameter for index in own for parameter in layers[index].parameters()}
    held = stage_module.sharding.local_parameters().values()
    outside = nn.ParameterList([p for p in held if p not in inside])
    return RankMemory(
        layers={index: model_state_bytes(layers[index], optimizers) for index in own},
        outside=model_state_bytes(outside, optimizers),
        activations=activations,
        free=free,
    )


def fewest_stages(partition: Partition, memories: Sequence[RankMemory]) -> int | None:
    """Find the fewest stages whose layers and micro-batches fit into every rank's memory.

    Each of n stages is counted with n micro-batches in flight, as in 1F1B. By AxoNN's analysis
    (Singh & Bhatele, IPDPS 2022) the shortest pipeline that fits is the fastest.

    Returns:
        A divisor of the present number of stages, perhaps that number itself; None as long as no
        micro-batch has been measured.
    """
    if not any(memory.activations for memory in memories):
        return None
    now = len(partition.parts)
    state = [0.0] * len(partition.layers)
    activations = [0.0] * len(partition.layers)
    for memory in memories:
        for index, held in memory.layers.items():
            state[index] = max(state[index], held)
            activations[index] = max(activations[index], memory.activations / len(memory.layers))
    available = min(memory.total for memory in memories)
    outside = max(memory.outside for memory in memories)
    for stages in divisors(now):
        parts = partition.with_stages(stages).parts
        need = outside + max(
            sum(state[i] + stages * activations[i] for i in part) for part in parts
        )
        if need <= available or stages == now:
            break
    rank_zero_debug(
        f"regrid='auto' takes {stages} of {now} stages: a rank needs {need / 1e6:,.1f} MB of the "
        f"{available / 1e6:,.1f} MB there are."
    )
    return stages


def model_state_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Count the bytes of weights, indices, resident copies, gradients and optimizer state.

    Gradients are counted even where there are none now; state in other memory, as AdamW keeps its
    number of steps, is not.
    """
    stored = state_bytes(module)
    moments = (
        leaf.nbytes
        for optimizer in optimizers
        for parameter in module.parameters()
        for leaf in tensors_in(optimizer.state.get(parameter, {}))
        if leaf.device == parameter.device
    )
    return 2 * stored.weights + stored.resident + stored.indices + sum(moments)


class Route(NamedTuple):
    """The rank that sends a tensor, and those that receive it."""

    source: int
    destinations: list[int]


def route(tensor: ReshardedTensor, old: Grid, new: Grid) -> Route:
    """Find the sender and the receivers of a tensor among the ranks given this rank's batches."""
    have = [r for r in new.same_batch_ranks if replace(old, rank=r).stage in tensor.before]
    need = [r for r in new.same_batch_ranks if replace(new, rank=r).stage in tensor.after]
    return Route(have[0], [rank for rank in need if rank not in have])


def move_tensors(
    sharding: Sharding, parts: Sequence[range], transfer: Transfer, old: Grid, new: Grid
) -> None:
    """Partition the layers anew, and send every tensor to the ranks that now need it.

    Collective over the ranks that are given the same batches. Gradients of what moves are dropped.
    """
    for resharded in sharding.reshard(parts, [new.stage]):
        name, tensor, _, after = resharded
        transfer.send(name, tensor, *route(resharded, old, new))
        if new.stage not in after:
            transfer.drop(name, tensor)


@dataclass(frozen=True)
class Regridded:
    """A move from one grid to another.

    Attributes:
        old: the grid before.
        new: the grid after.
        epoch: the first epoch on the new grid, counted from 0.
        seconds: how long the move took.
        microbatches: micro-batches that a batch is cut into, for all replicas that share it.
    """

    old: Grid
    new: Grid
    epoch: int
    seconds: float
    microbatches: int

    @property
    def bubbles(self) -> tuple[float, float]:
        """The fraction of a step in which equal stages fill and drain, before and after."""
        return self._bubble(self.old), self._bubble(self.new)

    def _bubble(self, grid: Grid) -> float:
        fills = grid.g_inter - 1
        return fills / (self.microbatches / grid.replicas_per_batch + fills)

    def __str__(self) -> str:
        """Both grids, their bubbles, and the time."""
        before, after = self.bubbles
        return (
            f"Epoch {self.epoch} begins on {self.new.g_inter} stages x {self.new.g_data} replicas "
            f"instead of {self.old.g_inter} x {self.old.g_data}, {self.new.replicas_per_batch} to "
            f"a batch: a bubble of {after:.1%} instead of {before:.1%}. The move took "
            f"{self.seconds:.2f} s."
        )


class Regrid:
    """Moves a run to shorter pipelines at the beginning of the epoch after the ticket was drawn.

    With ``stages="auto"`` it waits until a micro-batch of the pruned module has been measured.
    ``whole_state`` makes a context in which each replica has all of the optimizer's state.
    """

    def __init__(
        self,
        stages: int | Literal["auto"],
        stage_module: StageModule,
        runner: StepRunner,
        rule: InFlightRule,
        whole_state: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stages, self._whole_state = stages, whole_state
        self._stage_module, self._runner, self._rule = stage_module, runner, rule
        self._phase: Literal["no ticket", "due", "over"] = "no ticket"

    def after_draw(self) -> None:
        """Move when the next epoch begins: pruning has freed memory."""
        self._phase = "due"

    def warn_without_draw(self) -> None:
        """Warn at the end of a run in which no ticket was drawn."""
        if self._phase == "no ticket":
            rank_zero_warn(
                f"regrid={self._stages!r} changed nothing, because no ticket was drawn. Is a "
                "GradualPruning among the Trainer's callbacks, with an end that comes before its "
                "last epoch?" + see("grid")
            )

    def begin_epoch(self, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded | None:
        """Move to shorter pipelines if that is due; collective over the job."""
        if self._phase != "due":
            return None
        stages = self._fewest_stages(optimizers) if self._stages == "auto" else self._stages
        if stages is None:
            return None
        self._phase = "over"
        if stages >= self._stage_module.grid.g_inter:
            return None
        return self._move(stages, epoch, optimizers)

    def _fewest_stages(self, optimizers: Sequence[Optimizer]) -> int | None:
        activations = self._runner.limit.saved_bytes
        own = measure_memory(self._stage_module, optimizers, activations, self._rule.free())
        return fewest_stages(
            self._stage_module.partition, all_gather(own, self._stage_module.groups.world)
        )

    def _move(self, stages: int, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded:
        began, module = time(), self._stage_module
        old, new = module.grid, module.grid.shortened(stages)
        partition = module.partition.with_stages(stages)
        self._runner.close()
        with self._whole_state(), module.reshard(partition, ProcessGroups(new)):
            transfer = Transfer(module.module, optimizers, module.device)
            move_tensors(module.sharding, partition.parts, transfer, old, new)
            release_freed_memory()
        self._runner.open(module)
        moved = Regridded(old, new, epoch, time() - began, self._runner.parts)
        rank_zero_info(str(moved))
        return moved
