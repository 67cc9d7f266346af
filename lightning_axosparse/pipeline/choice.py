"""Chooses the schedule and the in-flight limit of a pipeline, by what its first batches measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.profile import activation_bytes
from lightning_axosparse.pipeline.schedule import SCHEDULES, Schedule, is_message_driven
from lightning_axosparse.support.messages import rank_zero_info
from lightning_axosparse.support.troubleshooting import see

_WARM_UP, _TRIALS = 1, 7  # batches of each schedule


class Trials(NamedTuple):
    """What one rank has measured.

    Attributes:
        seconds: median seconds of a batch's passes with each of the schedules.
        reordered: whether deferral has changed the order of a sum.
    """

    seconds: tuple[float, ...]
    reordered: bool


def tried(schedule: str, may_defer: bool) -> list[str]:
    """The names of the schedules of which the fastest is used.

    Args:
        schedule: one of ``SCHEDULES``, or "message-driven" for the fastest of these.
        may_defer: whether nothing else forbids that one defers weight gradients.
    """
    if schedule != "message-driven":
        return [schedule]
    return ["together", "cooldown", "deferred"] if may_defer else ["together"]


class ScheduleChoice:
    """Runs the first batches by several schedules in turn, and the others by the fastest one.

    All make the same gradients to the bit, unless a step reads a weight besides calling its layer;
    where that is found the choice is the first, because it must not depend on times. Whether
    deferral pays depends on how long stages wait and on what it costs, which differs by processor:
    a split layer takes longer, and a product whose operands have left the cache does.

    Args:
        names: of the schedules; first the one whose backward passes are whole, last the one that
            takes the most memory.
        gather: returns the values of all ranks on every rank; collective over the job.
    """

    def __init__(
        self,
        names: Sequence[str],
        gather: Callable[[Trials], list[Trials]],
    ) -> None:
        self._names, self._schedules = names, [SCHEDULES[name] for name in names]
        self._gather = gather
        self.measure_again()

    def measure_again(self) -> None:
        """Run all in turn again, where there are several."""
        is_given = len(self._schedules) == 1
        self._chosen: type[Schedule] | None = self._schedules[0] if is_given else None
        self._seconds: list[float] = []
        self._reordered = False

    def begin_batch(self) -> type[Schedule]:
        """Return the schedule of the next batch; gathers once, when all trials have run."""
        if self._chosen is not None:
            return self._chosen
        turn, place = divmod(len(self._seconds), len(self._schedules))
        if turn == _WARM_UP + _TRIALS:
            self._chosen = self._choose()
            return self._chosen
        # The first batch, in which memory is measured, is one that takes the most of it.
        return self._schedules[-1 - place]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the passes of a batch."""
        began = perf_counter()
        yield
        if self._chosen is None:
            self._seconds.append(perf_counter() - began)

    def forget_batch(self) -> None:
        """Do not count the last batch, which runs again on this replica, and not on others."""
        if self._chosen is None:
            self._seconds.pop()

    def found_reordered_sums(self) -> None:
        """Choose whole backward passes in the end."""
        self._reordered = True

    def _choose(self) -> type[Schedule]:
        count = len(self._schedules)
        timed = self._seconds[_WARM_UP * count :]
        medians = tuple(median(timed[place::count]) for place in reversed(range(count)))
        ranks = self._gather(Trials(medians, self._reordered))
        if any(rank.reordered for rank in ranks):
            rank_zero_info(
                "schedule='together': the step reads a weight besides calling its layer, "
                "so deferral would change the order of its gradient's terms."
            )
            return self._schedules[0]
        slowest = [max(each) for each in zip(*(rank.seconds for rank in ranks), strict=True)]
        best = slowest.index(min(slowest))
        others = ", ".join(
            f"{name} {seconds * 1e3:,.0f}"
            for seconds, name in zip(slowest, self._names, strict=True)
            if name != self._names[best]
        )
        rank_zero_info(
            f"schedule={self._names[best]!r} is fastest: {slowest[best] * 1e3:,.0f} ms a "
            f"batch ({others})."
        )
        return self._schedules[best]


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

    def measured_pending(self, stage: int, size: int) -> None:
        """Take in what a stage keeps of a micro-batch that waits for its weight gradients."""

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

    def measured_pending(self, stage: int, size: int) -> None:
        """Count a micro-batch as what it keeps until its weight gradients, if that is more."""
        self._kept[stage] = max(self._kept.get(stage, 0), size)
        self.kept = sum(self._kept.values())

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
        rank_zero_info(
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
        if self.given is not None or stages == 1 or not is_message_driven(self.schedule):
            return InFlightLimit(self.given or stages)
        return MemoryInFlightLimit(stages, self, partial(all_gather, group=groups.world))
