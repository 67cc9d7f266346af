"""Chooses the in-flight limit of a pipeline by the memory that a micro-batch takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_debug

from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.profile import activation_bytes
from lightning_axosparse.support.troubleshooting import see


class InFlightLimit:
    """A constant in-flight limit of a pipeline, the same on all ranks.

    Attributes:
        value: the limit in the running batch, in micro-batches.
        largest: the largest possible value, for which receive buffers are allocated.
        saved_bytes: bytes that this rank saves of a micro-batch for backward; 0 if not measured.
    """

    def __init__(self, value: int) -> None:
        self.value = self.largest = value
        self.saved_bytes = 0

    def begin_batch(self, held: int = 0) -> None:
        """Choose the limit for the training batch that begins; may be collective over the job.

        Args:
            held: number of micro-batches that every stage has to hold, whatever the limit.

        Raises:
            MisconfigurationException: if a measurement shows that they do not fit into memory.
        """

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Return the context of a stage's forward pass, measured if the limit depends on it."""
        return nullcontext()

    def measure_again(self) -> None:
        """Choose the limit again, because memory was freed."""


class Capacity(NamedTuple):
    """The number of micro-batches that fit into the memory of one rank.

    Attributes:
        micro_batches: the number, within the bounds of the limit.
        saved_bytes: bytes that the rank saves of a micro-batch for backward.
        free: bytes that it may still allocate.
    """

    micro_batches: int
    saved_bytes: int
    free: int


class MemoryInFlightLimit(InFlightLimit):
    """The largest in-flight limit for which memory suffices.

    It is at least the number of stages, as in 1F1B, and at most twice that. The bytes that a stage
    saves of a micro-batch are measured in the first batch, which runs at the lower bound. Free
    memory is measured after the optimizer has stepped, and so has allocated its state. The rank
    with the least capacity decides for all, because a stage gains nothing by holding more
    micro-batches than the next stage.

    Args:
        stages: number of stages.
        device: device of this rank.
        free: returns the bytes that this rank may still allocate.
        steps: returns the number of optimizer steps.
        gather: returns the capacities of all ranks.
    """

    def __init__(
        self,
        stages: int,
        device: torch.device,
        free: Callable[[], int],
        steps: Callable[[], int],
        gather: Callable[[Capacity], list[Capacity]],
    ) -> None:
        super().__init__(stages)
        self.largest = 2 * stages
        self._least, self._device = stages, device
        self._free, self._steps, self._gather = free, steps, gather
        self.measure_again()

    def measure_again(self) -> None:
        """Measure in the next batch, and choose the limit after it."""
        self._saved_bytes: dict[int, int] = {}
        self._held = self._most_held = 0
        self._chosen = False

    def begin_batch(self, held: int = 0) -> None:
        """Choose the limit once, after the measurement; collective over the job then."""
        self._held = held
        if self._saved_bytes and held > self._most_held:  # As many as before fit again.
            self._validate(held)
            self._most_held = held
        if not self._saved_bytes:
            self._measured_at = self._steps()
        elif not self._chosen and self._steps() > self._measured_at:
            self._choose()

    def measured(self, stage: int, received: Any) -> AbstractContextManager[None]:
        """Return the context of a stage's forward pass, of which the first is measured."""
        return nullcontext() if stage in self._saved_bytes else self._measure(stage, received)

    @contextmanager
    def _measure(self, stage: int, received: Any) -> Iterator[None]:
        with activation_bytes(self._device, received) as saved_bytes:
            yield
            self._saved_bytes[stage] = saved_bytes()
        self.saved_bytes = sum(self._saved_bytes.values())
        self._validate(self._held - 1)

    def _validate(self, more: int) -> None:
        """Check that ``more`` micro-batches fit into the free memory."""
        if more * self.saved_bytes > (free := self._free()):
            raise MisconfigurationException(
                f"The loss is differentiated once a batch, so rank {this_rank().rank} has to hold "
                f"{more} micro-batches more, which takes {more * self.saved_bytes / 1e9:,.2f} GB, "
                f"but {free / 1e9:,.2f} GB are free. With recompute='sqrt' it holds less of each; "
                "more stages, or a smaller batch with accumulate_grad_batches, need less as well; "
                "if the loss is a mean over samples, loss='mean' holds few micro-batches."
                + see("memory")
            )

    def _choose(self) -> None:
        free = self._free()
        fitting = min(free // max(1, self.saved_bytes), self.largest)
        capacities = self._gather(Capacity(max(fitting, self._least), self.saved_bytes, free))
        tightest = min(capacities)
        self.value, self._chosen = tightest.micro_batches, True
        rank_zero_debug(
            f"At most {self.value} micro-batches in flight: rank {capacities.index(tightest)} uses "
            f"{tightest.saved_bytes / 1e6:,.1f} MB per micro-batch; {tightest.free / 1e9:,.1f} GB "
            "free."
        )
