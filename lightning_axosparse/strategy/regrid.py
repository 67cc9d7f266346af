"""Changes a run to shorter pipelines and more replicas once a ticket was drawn.

Tensors are sent one at a time, directly from a rank that stores one to the ranks that need it. So
no rank ever holds more than the tensors of its old and new stage, and one with its optimizer state.
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
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.pipeline.shard.sharded_module import Transfer
from lightning_axosparse.pipeline.shard.sharding import ReshardedTensor, Sharding
from lightning_axosparse.sparse.module.parameters import state_bytes
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.train_step import StepRunner
from lightning_axosparse.strategy.validation import advise_on_parts_of_batches
from lightning_axosparse.support.memory import release_freed_memory
from lightning_axosparse.support.torch_internals import tensors_in
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank, in bytes.

    Attributes:
        layers: model state of each layer on this rank, by the layer's index.
        outside: model state outside the layers, which every stage has.
        activations: memory of a micro-batch in these layers between forward and backward.
        free: memory that the rank may still allocate.
    """

    layers: Mapping[int, int]
    outside: int
    activations: int
    free: int

    @property
    def total(self) -> int:
        """The memory for model state and micro-batches together."""
        return self.free + self.outside + sum(self.layers.values())


def measure_memory(
    stage_module: StageModule, optimizers: Sequence[Optimizer], activations: int, free: int
) -> RankMemory:
    """Count the bytes of this rank's layers; the optimizers must have stepped, to have state."""
    layers, parts = stage_module.layers.layers, stage_module.layers.parts
    own = [index for stage in stage_module.stages for index in parts[stage]]
    inside = {parameter for index in own for parameter in layers[index].parameters()}
    local = stage_module.sharding.local_parameters().values()
    outside = nn.ParameterList([p for p in local if p not in inside])
    return RankMemory(
        layers={index: model_state_bytes(layers[index], optimizers) for index in own},
        outside=model_state_bytes(outside, optimizers),
        activations=activations,
        free=free,
    )


def fewest_stages(partition: Partition, memories: Sequence[RankMemory]) -> int | None:
    """Find the fewest stages whose layers and micro-batches fit into every rank's memory.

    With n stages, each has n micro-batches in flight, as in 1F1B. By AxoNN's analysis (Singh &
    Bhatele, IPDPS 2022) the shortest pipeline that fits is the fastest.

    Returns:
        A divisor of the present number of stages, or that number itself; None if no micro-batch has
        been measured yet.
    """
    if not any(memory.activations for memory in memories):
        return None
    now = len(partition.parts)
    state = [0.0] * len(partition.layers)
    activations = [0.0] * len(partition.layers)
    for memory in memories:
        for index, size in memory.layers.items():
            state[index] = max(state[index], size)
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

    Gradients are counted even if there are none now. State on another device, such as AdamW's
    number of steps, is not counted.
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
    """Find the sender and the receivers of a tensor among the ranks that get the same batches."""
    holders = [r for r in new.same_batch_ranks if replace(old, rank=r).stage in tensor.before]
    needing = [r for r in new.same_batch_ranks if replace(new, rank=r).stage in tensor.after]
    return Route(holders[0], [rank for rank in needing if rank not in holders])


def move_tensors(
    sharding: Sharding, parts: Sequence[range], transfer: Transfer, old: Grid, new: Grid
) -> None:
    """Change the partition of the layers, and send every tensor to the ranks that now need it.

    Collective over the ranks that get the same batches. Gradients of moved tensors are dropped.
    """
    for resharded in sharding.reshard(parts, [new.stage]):
        name, tensor, _, after = resharded
        transfer.send(name, tensor, *route(resharded, old, new))
        if new.stage not in after:
            transfer.drop(name, tensor)


@dataclass(frozen=True)
class Regridded:
    """A change from one grid to another.

    Attributes:
        old: the grid before.
        new: the grid after.
        epoch: the first epoch on the new grid, counted from 0.
        seconds: the time that it took.
        microbatches: micro-batches of a batch, for all replicas that share it.
    """

    old: Grid
    new: Grid
    epoch: int
    seconds: float
    microbatches: int

    @property
    def bubbles(self) -> tuple[float, float]:
        """The fraction of a step in which equal stages fill and drain, before and after.

        For 8 micro-batches on 4 stages it is 3 / (8 + 3); on 2 stages, whose replicas share the
        batch, each with 4 micro-batches, 1 / (4 + 1).
        """
        return self._bubble(self.old), self._bubble(self.new)

    def _bubble(self, grid: Grid) -> float:
        fills = grid.g_inter - 1
        return fills / (self.microbatches / grid.replicas_per_batch + fills)

    def __str__(self) -> str:
        """Return the grids, their bubbles and the time in words."""
        before, after = self.bubbles
        return (
            f"Epoch {self.epoch} begins on {self.new.g_inter} stages x {self.new.g_data} replicas "
            f"instead of {self.old.g_inter} x {self.old.g_data}, {self.new.replicas_per_batch} to "
            f"a batch: a bubble of {after:.1%} instead of {before:.1%}. The move took "
            f"{self.seconds:.2f} s."
        )


class Regrid:
    """Changes a run to shorter pipelines when the epoch after the draw of the ticket begins.

    With ``stages="auto"`` it waits until a micro-batch of the pruned module has been measured.
    ``free`` returns the bytes that this rank may still allocate, ``unsharded_state`` a context in
    which each replica has the whole optimizer state.
    """

    def __init__(
        self,
        stages: int | Literal["auto"],
        stage_module: StageModule,
        runner: StepRunner,
        free: Callable[[], int],
        unsharded_state: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._stages, self._unsharded_state = stages, unsharded_state
        self._stage_module, self._runner, self._free = stage_module, runner, free
        self._phase: Literal["no ticket", "due", "over"] = "no ticket"

    def after_draw(self) -> None:
        """Change when the next epoch begins, as pruning has freed memory."""
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
        """Change to shorter pipelines if that is due; collective over all ranks."""
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
        own = measure_memory(self._stage_module, optimizers, activations, self._free())
        return fewest_stages(
            self._stage_module.partition, all_gather(own, self._stage_module.groups.world)
        )

    def _move(self, stages: int, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded:
        start, module = time(), self._stage_module
        old, new = module.grid, module.grid.shortened(stages)
        partition = module.partition.with_stages(stages)
        self._runner.close()
        with self._unsharded_state(), module.reshard(partition, ProcessGroups(new)):
            transfer = Transfer(module.module, optimizers, module.device)
            move_tensors(module.sharding, partition.parts, transfer, old, new)
            release_freed_memory()
        self._runner.open(module)
        regridded = Regridded(old, new, epoch, time() - start, self._runner.microbatch_count)
        rank_zero_info(str(regridded))
        advise_on_parts_of_batches(module.module, partition.layers, regridded.microbatches)
        if self._runner.reduction is None:
            rank_zero_warn(
                "From now on each replica trains on a part of the batch, and its loss is weighted "
                "by its samples, which is right for a mean over them. If it is another function of "
                "the batch, such as a sum or a contrastive loss, it differs from one process: "
                "declare AxoSparseStrategy(loss=...), or leave regrid= out." + see("losses")
            )
        return regridded
