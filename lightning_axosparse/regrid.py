"""Regrid: going on with shorter pipelines and more replicas, once pruning has made room for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import time
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_axosparse.dealing import Deal
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.grid import Grid, divisors
from lightning_axosparse.groups import Groups
from lightning_axosparse.pipeline.limit import Limit
from lightning_axosparse.shortest import measure, shortest
from lightning_axosparse.stepping import Stepper


def refuse_together(
    regrid: int | str | None, transport: str, in_flight: int | None, schedule: str
) -> None:
    """Refuse what a run cannot move with, or to.

    Raises:
        MisconfigurationException: naming the argument that does not go with ``regrid``.
    """
    if regrid is not None and transport == "loopback":
        raise MisconfigurationException(
            f"regrid={regrid!r} moves layers between ranks, but transport='loopback' runs all "
            "stages in one process. Leave regrid out."
        )
    if regrid == "auto" and (in_flight is not None or schedule != "message-driven"):
        raise MisconfigurationException(
            "regrid='auto' needs the bytes of a micro-batch, which are measured for "
            "schedule='message-driven' with in_flight=None alone. Leave these two as they are by "
            "default, or give regrid a number of stages."
        )


def refuse_length(regrid: int | str | None, g_inter: int) -> None:
    """Refuse a number of stages that a pipeline of ``g_inter`` cannot be shortened to.

    Raises:
        MisconfigurationException: naming the numbers that are possible.
    """
    if isinstance(regrid, int) and (g_inter % regrid or regrid == g_inter):
        shorter = divisors(g_inter)[:-1]
        choice = f"Choose from {shorter}, or 'auto'" if shorter else "Leave regrid out"
        raise MisconfigurationException(
            f"regrid={regrid} is no proper divisor of g_inter={g_inter}, so the ranks of a "
            f"pipeline cannot form pipelines of so many stages. {choice}."
        )


def refuse_module(module: nn.Module) -> None:
    """Refuse what would not stay the same when several replicas share a batch.

    Raises:
        MisconfigurationException: naming the layer or the metric.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise MisconfigurationException(
                f"{name!r} ({type(part).__name__}) keeps running statistics of the micro-batches "
                "that it sees. After a regrid replicas share each batch, so they would differ "
                "between them. Use a norm without, such as nn.GroupNorm or nn.LayerNorm, or leave "
                "regrid out, and resume the checkpoint with another g_inter."
            )
        if isinstance(part, Metric) and part.dist_sync_on_step:
            raise MisconfigurationException(
                f"The metric {name!r} ({type(part).__name__}) synchronises in every micro-batch "
                "(dist_sync_on_step=True), of which replicas that share a batch after a regrid may "
                "have different numbers. Leave dist_sync_on_step out, or regrid."
            )


def bubble(stages: int, microbatches: float) -> float:
    """Share of a step that equal stages wait while the pipeline fills and drains.

    Args:
        stages: number of stages.
        microbatches: micro-batches that go through them in a step.
    """
    return (stages - 1) / (microbatches + stages - 1)


@dataclass(frozen=True)
class Regridded:
    """A move from one grid to another.

    Attributes:
        old: the grid as it was.
        new: the grid as it is.
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
            bubble(self.old.g_inter, self.microbatches / self.old.sharing),
            bubble(self.new.g_inter, self.microbatches / self.new.sharing),
        )

    def __str__(self) -> str:
        """Tell both grids, their bubbles, and the time."""
        before, after = self.bubbles
        return (
            f"Epoch {self.epoch} begins on {self.new.g_inter} stages x {self.new.g_data} replicas "
            f"instead of {self.old.g_inter} x {self.old.g_data}, {self.new.sharing} to a batch: a "
            f"bubble of {after:.1%} instead of {before:.1%}. The move took {self.seconds:.2f} s."
        )


class Regrid:
    """The one move of a run, once it is due.

    Args:
        stages: to how many stages; "auto" for as few as memory allows.
        dealt: the layers as they are dealt now.
        deployment: what moves.
        stepper: runs its steps.
        limit: the in-flight limit on the grid of some groups.
        free: tells the bytes that this rank may still take.
        microbatches: micro-batches that a batch is cut into.
    """

    def __init__(
        self,
        stages: int | Literal["auto"],
        dealt: Deal,
        deployment: Deployment,
        stepper: Stepper,
        limit: Callable[[Groups], Limit],
        free: Callable[[], int],
        microbatches: int,
    ) -> None:
        self._stages, self._dealt, self._microbatches = stages, dealt, microbatches
        self._deployment, self._stepper = deployment, stepper
        self._limit, self._free = limit, free
        self._is_due = self._drawn = False

    def after_draw(self) -> None:
        """Move when the next epoch begins: pruning has made room."""
        self._is_due = self._drawn = True

    def warn_without_draw(self) -> None:
        """Warn at the end of a run that has had nothing to move for."""
        if not self._drawn:
            rank_zero_warn(
                f"regrid={self._stages!r} changed nothing, because no ticket was drawn. Is an "
                "EarlyBirdTicket among the Trainer's callbacks, with a draw_by_epoch that the run "
                "reaches?"
            )

    def begin_epoch(self, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded | None:
        """Go over to shorter pipelines and tell of it, if that is due; collective over the job."""
        if not self._is_due:
            return None
        stages = self._shortest(optimizers) if self._stages == "auto" else self._stages
        self._is_due = stages is None
        if stages is not None and stages < self._deployment.grid.g_inter:
            return self._shorten(stages, epoch, optimizers)
        return None

    def _shortest(self, optimizers: Sequence[Optimizer]) -> int | None:
        kept = self._stepper.pipeline.limit.kept
        mine = measure(self._deployment, optimizers, kept, self._free())
        return shortest(self._dealt, self._deployment.groups.gather(mine))

    def _shorten(self, stages: int, epoch: int, optimizers: Sequence[Optimizer]) -> Regridded:
        began, old = time(), self._deployment.grid
        self._stepper.close()
        groups = Groups(old.shortened(stages), self._deployment.device.type)
        self._deployment.move(self._dealt.among(stages), groups, optimizers)
        self._stepper.open(self._deployment, self._limit(groups))
        moved = Regridded(old, groups.grid, epoch, time() - began, self._microbatches)
        rank_zero_info(str(moved))
        return moved
