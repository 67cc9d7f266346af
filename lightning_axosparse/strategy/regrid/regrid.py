"""Moves a run to shorter pipelines and more replicas once a ticket was drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import time
from typing import Literal

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.pipeline.choice import InFlightRule
from lightning_axosparse.strategy.regrid.min_stages import fewest_stages, measure_memory
from lightning_axosparse.strategy.regrid.transfer import Transfer
from lightning_axosparse.strategy.stage_module import StageModule
from lightning_axosparse.strategy.step.train_step import StepRunner
from lightning_axosparse.support.troubleshooting import see


def bubble(stages: int, microbatches: float) -> float:
    """The fraction of a step in which equal stages are idle while the pipeline fills and drains.

    Args:
        stages: number of stages.
        microbatches: micro-batches that go through them in a step.
    """
    return (stages - 1) / (microbatches + stages - 1)


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
        """The :func:`bubble` before and after."""
        return (
            bubble(self.old.g_inter, self.microbatches / self.old.replicas_per_batch),
            bubble(self.new.g_inter, self.microbatches / self.new.replicas_per_batch),
        )

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

    Args:
        stages: number of stages after the move; "auto" for the fewest that fit into memory.
        stage_module: the part of the module on this rank.
        runner: runs its steps.
        rule: the memory that is free.
        microbatches: micro-batches that a batch is cut into.
        whole_state: makes a context in which each replica has all of the optimizer's state.
    """

    def __init__(
        self,
        stages: int | Literal["auto"],
        stage_module: StageModule,
        runner: StepRunner,
        rule: InFlightRule,
        microbatches: int,
        whole_state: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._whole_state = whole_state
        self._stages, self._microbatches = stages, microbatches
        self._stage_module, self._runner, self._rule = stage_module, runner, rule
        self._phase: Literal["no ticket", "due", "over"] = "no ticket"

    def after_draw(self) -> None:
        """Move when the next epoch begins: pruning has freed memory."""
        self._phase = "due"

    def warn_without_draw(self) -> None:
        """Warn at the end of a run in which no ticket was drawn."""
        if self._phase == "no ticket":
            rank_zero_warn(
                f"regrid={self._stages!r} changed nothing, because no ticket was drawn. Is an "
                "EarlyBirdTicket among the Trainer's callbacks, with a draw_by that comes before "
                "its last epoch?" + see("grid")
            )

    def begin_epoch(self, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded | None:
        """Move to shorter pipelines if that is due; collective over the job.

        Returns:
            The move; None if there was none.
        """
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
        activations = self._runner.limit.kept
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
            Transfer(module.sharding, old, new, optimizers, module.device).run(partition.parts)
        self._runner.open(module)
        moved = Regridded(old, new, epoch, time() - began, self._microbatches)
        rank_zero_info(str(moved))
        return moved
