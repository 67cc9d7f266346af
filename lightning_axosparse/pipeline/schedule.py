"""Decides which pass a stage runs next, without tensors, messages or a clock.

The choice of a stage of ``S`` stages (``held`` = forwards - backwards started, ``warm-up`` =
min(S - stage, in-flight limit)):

    schedule         held < warm-up and   otherwise          when the message for it is missing
                     forwards remain
    message-driven   prefers forward      prefers backward   runs the other, if there is slack
    1f1b             forward              backward           waits

Where the loss is differentiated once a batch, all forward passes run before all backward passes, as
in GPipe (Huang et al., NeurIPS 2019), with every schedule.

The preference of the message-driven schedule is 1F1B's and not AxoNN's backward-first: at the same
memory, draining backwards first starves the later stages. What makes it faster than 1F1B is slack,
an in-flight limit above the number of stages, which a static order cannot use. Without slack a
stage still goes ahead with a forward below the limit, but no longer with a backward below its
warm-up: one that runs when the missing activation comes delays all later stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

PassKind = Literal["forward", "backward"]


class Op(NamedTuple):
    """One pass of one micro-batch through one stage."""

    kind: PassKind
    microbatch: int


class Schedule(ABC):
    """The progress of one stage through one batch.

    Args:
        stage: index of the stage, counted from the input.
        stages: number of stages in the pipeline.
        microbatches: micro-batches in this batch.
        in_flight: largest number of micro-batches that this stage may hold.
        forwards_first: whether backward passes wait until all forward passes have run, so that the
            stage holds every micro-batch, whatever the limit.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        microbatches: int,
        in_flight: int,
        forwards_first: bool = False,
    ) -> None:
        self.stage, self.stages, self.microbatches = stage, stages, microbatches
        self.in_flight = microbatches if forwards_first else in_flight
        self.warm_up = microbatches if forwards_first else min(stages - stage, in_flight)
        self._forwards_first = forwards_first
        self.forwards = 0
        self.backwards = 0
        self.held = 0
        """Number of micro-batches that have gone forward and not yet back."""

    @property
    def finished(self) -> bool:
        """Whether every micro-batch has gone forward and back."""
        return self.backwards == self.microbatches

    def start_next(self, activations: int, gradients: int) -> Op | None:
        """Choose the next pass and count it as started.

        Args:
            activations: number of activations that have arrived in this batch; on the first stage,
                that of all micro-batches.
            gradients: number of gradients that have arrived in this batch; on the last stage, that
                of all micro-batches.

        Returns:
            The pass to run now; None if the stage has to wait for a message.
        """
        arrived = self.arrived(activations, gradients)
        can_forward = arrived["forward"] and self.held < self.in_flight
        waits = self._forwards_first and self.forwards < self.microbatches
        can_backward = arrived["backward"] and not waits
        if not (can_forward or can_backward):
            return None
        kind = self._choose(can_forward, can_backward)
        return None if kind is None else self.start(kind)

    def arrived(self, activations: int, gradients: int) -> dict[PassKind, bool]:
        """Whether the message for the next pass of each kind has arrived; arguments as above."""
        return {
            "forward": self.forwards < min(self.microbatches, activations),
            "backward": self.backwards < min(self.forwards, gradients),
        }

    def start(self, kind: PassKind) -> Op:
        """Count the next pass of a kind as started."""
        if kind == "forward":
            self.forwards += 1
            self.held += 1
            return Op(kind, self.forwards - 1)
        self.backwards += 1
        self.held -= 1
        return Op(kind, self.backwards - 1)

    @abstractmethod
    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        """Choose among the passes that may run now."""

    @property
    def _warming_up(self) -> bool:
        return self.forwards < self.microbatches and self.held < self.warm_up


class MessageDriven(Schedule):
    """Prefers the pass of 1F1B, and runs the other instead of waiting for its message."""

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        if can_forward and (not can_backward or self._warming_up):
            return "forward"
        has_slack = self.in_flight > self.stages
        if can_backward and (has_slack or not self._warming_up):
            return "backward"
        return None


class OneForwardOneBackward(Schedule):
    """The static 1F1B order of PipeDream-flush (Narayanan et al., SC 2021), for comparison."""

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        if self._warming_up:
            return "forward" if can_forward else None
        return "backward" if can_backward else None


class ForwardOnly(Schedule):
    """Evaluation: a micro-batch is done, and no longer held, once it has gone forward."""

    @property
    def finished(self) -> bool:
        """Whether every micro-batch has gone forward."""
        return self.forwards == self.microbatches

    def start(self, kind: PassKind) -> Op:
        """Count the next pass as started; nothing is held for it."""
        op = super().start(kind)
        self.held = 0
        return op

    def _choose(self, can_forward: bool, can_backward: bool) -> PassKind | None:
        return "forward" if can_forward else None


SCHEDULES: dict[str, type[Schedule]] = {
    "message-driven": MessageDriven,
    "1f1b": OneForwardOneBackward,
}
"""The schedules by name."""
