"""Chooses the in-flight limit of a pipeline, by the memory that its first batch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.profile import activation_bytes
from lightning_axosparse.support.notes import note
from lightning_axosparse.support.troubleshooting import see


class InFlightLimit:
    """The in-flight limit of a pipeline, the same on all ranks in any one batch: a constant one.

    Attributes:
        value: the limit of the running batch.
        largest: the largest value that it may take; receive buffers are allocated for so many.
        kept: bytes that this rank keeps of a micro-batch, as last measured; 0: not measured.
    """

    def __init__(self, value: int) -> None:
        self.value = self.largest = value
        self.kept = 0

    def begin_batch(self, held: int = 0) -> None:
        """Choose the limit of the training batch that begins; may be collective over the job.

        Args:
            held: micro-batches that every stage has to hold, where the limit does not count.

        Raises:
            MisconfigurationException: if these are seen not to fit into memory.
        """

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Measure a stage's forward pass in this context, where the limit depends on it."""
        return nullcontext()

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
    """

    def __init__(
        self,
        stages: int,
        rule: InFlightRule,
        gather: Callable[[Capacity], list[Capacity]],
    ) -> None:
        super().__init__(stages)
        self.largest = 2 * stages
        self._least, self._rule, self._gather = stages, rule, gather
        self.measure_again()

    def measure_again(self) -> None:
        """Measure in the next batch, and choose after it."""
        self._kept: dict[int, int] = {}
        self._held = 0
        self._chosen = False

    def begin_batch(self, held: int = 0) -> None:
        """Choose the limit once, after it was measured; collective over the job then."""
        self._held = held
        if self._kept and held:
            self._validate(held)
        if not self._kept:
            self._measured_at = self._rule.steps()
        elif not self._chosen and self._rule.steps() > self._measured_at:
            self._choose()

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Measure what the stage keeps of its first micro-batch."""
        return nullcontext() if stage in self._kept else self._measure(stage, received)

    @contextmanager
    def _measure(self, stage: int, received: Any) -> Iterator[None]:
        with activation_bytes(self._rule.device, received) as kept:
            yield
            self._kept[stage] = kept()
        self.kept = sum(self._kept.values())
        self._validate(self._held - 1)

    def _validate(self, more: int) -> None:
        """Check that so many more micro-batches fit into memory."""
        if more * self.kept > (free := self._rule.free()):
            raise MisconfigurationException(
                f"The loss is differentiated once a batch, so rank {this_rank().rank} has to hold "
                f"{more} micro-batches more, which takes {more * self.kept / 1e9:,.2f} GB, but "
                f"{free / 1e9:,.2f} GB are free. With recompute='sqrt' it holds less of each; more "
                "stages, or a smaller batch with accumulate_grad_batches, need less as well; with "
                "loss='parts' it holds few micro-batches, and the loss is taken as a mean over "
                "samples." + see("memory")
            )

    def _choose(self) -> None:
        free = self._rule.free()
        fitting = min(free // max(1, self.kept), self.largest)
        capacities = self._gather(Capacity(max(fitting, self._least), self.kept, free))
        tightest = min(capacities)
        self.value, self._chosen = tightest.micro_batches, True
        note(
            f"At most {self.value} micro-batches in flight: rank {capacities.index(tightest)} uses "
            f"{tightest.kept / 1e6:,.1f} MB per micro-batch; {tightest.free / 1e9:,.1f} GB free."
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
        """The limit of a pipeline of so many stages."""
        if self.given is not None or stages == 1 or self.schedule != "message-driven":
            return InFlightLimit(self.given or stages)
        return MemoryInFlightLimit(stages, self, partial(all_gather, group=groups.world))
