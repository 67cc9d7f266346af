"""Limit: how many micro-batches a stage may hold between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_axosparse.pipeline.activations import kept_bytes
from lightning_axosparse.pipeline.engine import Compute


class Limit(Protocol):
    """The in-flight limit of a pipeline, the same on all ranks in any one batch."""

    value: int
    """The limit of the running batch."""

    largest: int
    """What no batch's limit will exceed: room for so many messages is made ahead of time."""

    kept: int
    """Bytes that a micro-batch leaves behind on this rank, as last measured; 0: not measured."""

    def begin_batch(self) -> None:
        """Settle the limit of the training batch that begins; may be collective over the job."""

    def observed(self, stage: int, compute: Compute) -> Compute:
        """A stage's forward pass, perhaps watched."""

    def measure_again(self) -> None:
        """Choose anew, because memory was freed."""


class FixedLimit:
    """A limit that was given.

    Args:
        value: the limit.
    """

    def __init__(self, value: int) -> None:
        self.value = self.largest = value
        self.kept = 0

    def begin_batch(self) -> None:
        """Need nothing: the limit is settled."""

    def observed(self, stage: int, compute: Compute) -> Compute:
        """The forward pass as it is."""
        return compute

    def measure_again(self) -> None:
        """Need nothing: the limit is settled."""


class _Room(NamedTuple):
    """How many micro-batches fit into the memory of one rank, and why."""

    micro_batches: int
    kept: int
    free: int


class MemoryLimit:
    """The limit that memory allows: at least 1F1B's, as many as there are stages, at most twice it.

    What a stage keeps of a micro-batch is measured in the first batch, which runs at the lower end.
    What is free counts when the optimizer has stepped, and so has its state. The rank with the
    least room decides for all, because a stage that holds more than the next can take gains
    nothing.

    Args:
        stages: stages of the pipeline.
        free: bytes that this rank may still take.
        device: device of this rank.
        steps: how often the optimizer has stepped.
        gather: hands every rank the values of all; collective over the job.
    """

    def __init__(
        self,
        stages: int,
        free: Callable[[], int],
        device: torch.device,
        steps: Callable[[], int],
        gather: Callable[[_Room], list[_Room]],
    ) -> None:
        self.value, self.largest = stages, 2 * stages
        self.kept = 0
        self._least, self._free, self._device = stages, free, device
        self._steps, self._gather = steps, gather
        self.measure_again()

    def measure_again(self) -> None:
        """Choose anew, by what is kept and free from the next batch on."""
        self._kept: dict[int, int] = {}
        self._settled = False

    def begin_batch(self) -> None:
        """Choose, once what the choice takes is known; collective over the job then."""
        if not self._kept:
            self._measured_at = self._steps()
        elif not self._settled and self._steps() > self._measured_at:
            self._settle()

    def observed(self, stage: int, compute: Compute) -> Compute:
        """A forward pass that notes what the first micro-batch leaves behind."""

        def measured(microbatch: int, received: Any) -> Any:
            if stage in self._kept:
                return compute(microbatch, received)
            with kept_bytes(self._device, received) as kept:
                output = compute(microbatch, received)
                self._kept[stage] = kept()
                self.kept = sum(self._kept.values())
            return output

        return measured

    def _settle(self) -> None:
        free = self._free()
        fitting = min(free // max(1, self.kept), self.largest)
        rooms = self._gather(_Room(max(fitting, self._least), self.kept, free))
        tightest = min(rooms)
        self.value, self._settled = tightest.micro_batches, True
        rank_zero_info(
            f"At most {self.value} micro-batches in flight (of {self._least} to {self.largest}): "
            f"rank {rooms.index(tightest)} keeps {tightest.kept / 1e6:,.1f} MB of each and may "
            f"take {tightest.free / 1e6:,.0f} MB more."
        )
