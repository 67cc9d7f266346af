"""Decides which pass one stage runs next, without tensors, messages or a clock.

What a stage of ``S`` stages does with what it may run (``held`` = forwards - backwards started,
``warm-up`` = min(S - stage, in-flight limit)):

    schedule         held < warm-up and   otherwise          when the message for it is missing
                     forwards remain
    message-driven   prefers forward      prefers backward   runs the other, if there is slack
    filling          the same             the same           runs the other, else a weight gradient
    cooldown         the same             the same           the same, but the weight gradients of
                                                             the first micro-batches are not apart
    1f1b             forward              backward           waits
    gpipe            forward              forward, until     waits
                                          all are done
    zb-h1            forward              backward           waits; a weight gradient comes first
                                                             while more than ``stage`` are pending

A backward pass computes two gradients: that of the stage's input, for which the previous stage
waits, and those of its weights, for which nobody does. The schedules that defer weight gradients
make passes of their own of the latter, as the zero-bubble schedules of Qi et al. (ICLR 2024) do;
those order them statically. RRFP (arXiv 2605.18750) orders them by arrival, too. A micro-batch is
``pending`` from its backward pass until its weight gradients are complete, keeps about as much
memory meanwhile as one that is held, and counts against the in-flight limit in the same way.

The preference of the message-driven schedule is 1F1B's and not AxoNN's backward-first: at the same
memory, draining backwards first starves the later stages. What makes it faster than 1F1B is slack,
an in-flight limit above the number of stages, which a static order cannot use. Without slack a
stage still goes ahead with a forward below the limit, but no longer with a backward below its
warm-up: one that runs when the missing activation comes delays all later stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

PassKind = Literal["forward", "backward", "weight gradient"]

WeightGradients = Literal["together", "cooldown", "deferred"]
"""When the gradients of weights are made: in backward passes; apart for the last micro-batches, at
whose end stages wait; or apart for all.
"""


class Op(NamedTuple):
    """One pass of one micro-batch through one stage; of weight gradients, a part of them."""

    kind: PassKind
    microbatch: int


class Schedule(ABC):
    """The progress of one stage through one batch.

    Args:
        stage: index of the stage, counted from the input.
        stages: number of stages in the pipeline.
        microbatches: micro-batches in this batch.
        in_flight: most micro-batches that may be held or pending on this stage.
        forwards_first: whether backward passes wait until all forward passes have run, so that the
            stage holds every micro-batch, whatever the limit.
    """

    defers_weight_gradients: ClassVar[bool] = False
    """Whether weight gradients are passes of their own and not parts of backward passes."""

    def __init__(
        self,
        stage: int,
        stages: int,
        microbatches: int,
        in_flight: int,
        forwards_first: bool = False,
    ) -> None:
        self.microbatches = microbatches
        self.in_flight = microbatches if forwards_first else in_flight
        self.warm_up = microbatches if forwards_first else min(stages - stage, in_flight)
        self._forwards_first = forwards_first
        self.forwards = 0
        self.backwards = 0
        self.weight_gradients = 0
        """Micro-batches whose weight gradients are complete."""

    @property
    def held(self) -> int:
        """Micro-batches that have gone forward and not yet back."""
        return self.forwards - self.backwards

    @property
    def pending(self) -> int:
        """Micro-batches that have gone back and whose weight gradients are not complete."""
        return self.backwards - self.weight_gradients

    def defers(self, microbatch: int) -> bool:
        """Whether the weight gradients of a micro-batch are passes of their own."""
        return self.defers_weight_gradients

    @property
    def finished(self) -> bool:
        """Whether every micro-batch has gone forward and back, with its weight gradients."""
        return self.weight_gradients == self.microbatches

    def start_next(self, activations: int, gradients: int) -> Op | None:
        """Choose the next pass and count it as started.

        Args:
            activations: how many activations have ever arrived in this batch; on the first stage,
                all micro-batches.
            gradients: how many gradients have ever arrived in this batch; on the last stage, all
                micro-batches.

        Returns:
            The pass to run now, or None when the stage has to wait for a message. Weight gradients
            are those of the oldest pending micro-batch, until :meth:`end_weight_gradients`.
        """
        can_forward = self.has_arrived("forward", activations, gradients)
        can_backward = self.has_arrived("backward", activations, gradients)
        if self._forwards_first and self.forwards < self.microbatches:
            can_backward = False
        if can_forward:
            can_forward = self.held + self.pending < self.in_flight
        kind = self._choose(can_forward, can_backward)
        return None if kind is None else self.start(kind)

    def has_arrived(self, kind: PassKind, activations: int, gradients: int) -> bool:
        """Whether the message for the next pass of a kind is there; arguments as above."""
        if kind == "forward":
            return self.forwards < min(self.microbatches, activations)
        return kind != "backward" or self.backwards < min(self.forwards, gradients)

    def start(self, kind: PassKind) -> Op:
        """Count the next pass of a kind as started."""
        if kind == "forward":
            self.forwards += 1
            return Op("forward", self.forwards - 1)
        if kind == "backward":
            op = Op("backward", self.backwards)
            self.backwards += 1
            self.weight_gradients += not self.defers(op.microbatch)
            return op
        return Op(kind, self.weight_gradients)

    def end_weight_gradients(self) -> None:
        """Count the weight gradients of the oldest pending micro-batch as complete."""
        self.weight_gradients += 1

    @abstractmethod
    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        """Choose among the passes that may run now."""

    @property
    def _warming_up(self) -> bool:
        return self.forwards < self.microbatches and self.held < self.warm_up


class MessageDriven(Schedule):
    """Prefers what 1F1B would run, and runs what else has arrived instead of waiting."""

    def __init__(self, stage: int, stages: int, *args: Any) -> None:
        super().__init__(stage, stages, *args)
        self._has_slack = self.in_flight > stages

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        if can_forward and (self._warming_up or not can_backward):
            return "forward"
        if can_backward and (self._has_slack or not self._warming_up):
            return "backward"
        return None


class BubbleFilling(MessageDriven):
    """Message-driven, and makes weight gradients where it would wait."""

    defers_weight_gradients = True

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        kind = super()._choose(can_forward, can_backward)
        return "weight gradient" if kind is None and self.pending else kind


class CooldownFilling(BubbleFilling):
    """Defers the weight gradients of the last micro-batches alone.

    Between balanced stages without jitter only the end of a batch makes a stage wait. Before that a
    deferred product gains nothing, and takes longer, as its operands have left the cache.
    """

    def __init__(self, stage: int, stages: int, microbatches: int, *args: Any) -> None:
        super().__init__(stage, stages, microbatches, *args)
        self._first_deferred = microbatches - (2 * stages - 1)

    def defers(self, microbatch: int) -> bool:
        """Whether a micro-batch is among the last, which may be all."""
        return microbatch >= self._first_deferred


class OneForwardOneBackward(Schedule):
    """The static 1F1B order of PipeDream-flush (Narayanan et al., SC 2021), for comparison."""

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        if self._warming_up:
            return "forward" if can_forward else None
        return "backward" if can_backward else None


class ZeroBubbleH1(OneForwardOneBackward):
    """The static order of ZB-H1 (Qi et al., ICLR 2024) in 1F1B's memory, for comparison."""

    defers_weight_gradients = True

    def __init__(self, stage: int, *args: Any) -> None:
        super().__init__(stage, *args)
        self._most_pending = min(stage, self.in_flight - self.warm_up)

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        most_pending = self._most_pending if self.backwards < self.microbatches else 0
        if self.pending > most_pending:
            return "weight gradient"
        return super()._choose(can_forward, can_backward)


class GPipe(OneForwardOneBackward):
    """All forwards, then all backwards (Huang et al., NeurIPS 2019), for comparison."""

    def __init__(self, stage: int, stages: int, microbatches: int, in_flight: int, *_: Any) -> None:
        super().__init__(stage, stages, microbatches, in_flight, forwards_first=True)


class ForwardOnly(Schedule):
    """Evaluation: a micro-batch is done, and no longer held, once it has gone forward."""

    @property
    def held(self) -> int:
        """Nothing is kept for a backward pass."""
        return 0

    @property
    def finished(self) -> bool:
        """Whether every micro-batch has gone forward."""
        return self.forwards == self.microbatches

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        return "forward" if can_forward else None


SCHEDULES: dict[str, type[Schedule]] = {
    "together": MessageDriven,
    "cooldown": CooldownFilling,
    "deferred": BubbleFilling,
    "1f1b": OneForwardOneBackward,
    "gpipe": GPipe,
    "zb-h1": ZeroBubbleH1,
}
"""The schedules by name; the first three, by `WeightGradients`, are message-driven, and the last
two are for benchmarks and the simulator alone.
"""


def is_message_driven(name: str) -> bool:
    """Whether a schedule is one of these three, or "message-driven": the fastest of them."""
    return name == "message-driven" or issubclass(SCHEDULES[name], MessageDriven)
