"""Limits how many micro-batches a stage holds between forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.pipeline.activation_bytes import activation_bytes


class InFlightLimit:
    """The in-flight limit of a pipeline, the same on all ranks in any one batch: a constant one.

    Args:
        value: the limit.

    Attributes:
        value: the limit of the running batch.
        largest: the largest value that it may take; receive buffers are allocated for so many.
        kept: bytes that this rank keeps of a micro-batch, as last measured; 0: not measured.
    """

    def __init__(self, value: int) -> None:
        self.value = self.largest = value
        self.kept = 0

    def begin_batch(self) -> None:
        """Choose the limit of the training batch that begins; may be collective over the job."""

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Measure a stage's forward pass in this context, where the limit depends on it.

        Args:
            stage: index of the stage.
            received: what the pass was given by the previous stage.
        """
        return nullcontext()

    def measured_pending(self, stage: int, size: int) -> None:
        """Take in what a stage keeps of a micro-batch that waits for its weight gradients.

        Args:
            stage: index of the stage.
            size: in bytes.
        """

    def measure_again(self) -> None:
        """Choose again, because memory was freed."""


class Capacity(NamedTuple):
    """How many micro-batches fit into the memory of one rank, and why.

    Attributes:
        micro_batches: as many as fit, within the bounds of the limit.
        kept: bytes that the rank keeps of a micro-batch.
        free: bytes that it may still take.
    """

    micro_batches: int
    kept: int
    free: int


class MemoryInFlightLimit(InFlightLimit):
    """The limit that memory allows, between the number of stages, as in 1F1B, and twice that.

    The bytes that a stage keeps of a micro-batch are measured in the first batch, which runs at the
    lower bound. Free memory is measured after the optimizer has stepped, and so has allocated its
    state. The rank with the least capacity decides for all, because a stage gains nothing by
    holding more than the next stage can take.

    Args:
        stages: stages of the pipeline.
        free: bytes that this rank may still take.
        device: device of this rank.
        steps: how often the optimizer has stepped.
        gather: returns the values of all ranks on every rank; collective over the job.
    """

    def __init__(
        self,
        stages: int,
        free: Callable[[], int],
        device: torch.device,
        steps: Callable[[], int],
        gather: Callable[[Capacity], list[Capacity]],
    ) -> None:
        super().__init__(stages)
        self.largest = 2 * stages
        self._least, self._free, self._device = stages, free, device
        self._steps, self._gather = steps, gather
        self.measure_again()

    def measure_again(self) -> None:
        """Measure in the next batch, and choose after it."""
        self._kept: dict[int, int] = {}
        self._chosen = False

    def begin_batch(self) -> None:
        """Choose the limit once, after it was measured; collective over the job then."""
        if not self._kept:
            self._measured_at = self._steps()
        elif not self._chosen and self._steps() > self._measured_at:
            self._choose()

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Measure what the stage keeps of its first micro-batch."""
        return nullcontext() if stage in self._kept else self._measure(stage, received)

    def measured_pending(self, stage: int, size: int) -> None:
        """Count a micro-batch as what it keeps until its weight gradients, if that is more."""
        self._kept[stage] = max(self._kept.get(stage, 0), size)
        self.kept = sum(self._kept.values())

    @contextmanager
    def _measure(self, stage: int, received: Any) -> Iterator[None]:
        with activation_bytes(self._device, received) as kept:
            yield
            self._kept[stage] = kept()
        self.kept = sum(self._kept.values())

    def _choose(self) -> None:
        free = self._free()
        fitting = min(free // max(1, self.kept), self.largest)
        capacities = self._gather(Capacity(max(fitting, self._least), self.kept, free))
        tightest = min(capacities)
        self.value, self._chosen = tightest.micro_batches, True
        rank_zero_info(
            f"At most {self.value} micro-batches in flight (of {self._least} to {self.largest}): "
            f"rank {capacities.index(tightest)} keeps {tightest.kept / 1e6:,.1f} MB of each and "
            f"may take {tightest.free / 1e6:,.0f} MB more."
        )


@dataclass(frozen=True)
class InFlightRule:
    """How the in-flight limit follows from the strategy's arguments and from memory.

    Attributes:
        given: the limit that the user gave; None for what memory allows.
        schedule: name of the training schedule.
        device: device of this rank.
        free: returns the bytes that this rank may still take.
        steps: returns how often the optimizer has stepped.
    """

    given: int | None
    schedule: str
    device: torch.device
    free: Callable[[], int]
    steps: Callable[[], int]

    def limit(self, stages: int, groups: ProcessGroups) -> InFlightLimit:
        """The limit of a pipeline of so many stages.

        Args:
            stages: stages of the pipeline.
            groups: the process groups of its grid.
        """
        if self.given is not None or stages == 1 or self.schedule != "message-driven":
            return InFlightLimit(self.given or stages)
        return MemoryInFlightLimit(
            stages,
            self.free,
            self.device,
            self.steps,
            partial(all_gather, group=groups.world),
        )
