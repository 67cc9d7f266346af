"""Runs batches through the stages of this process, in the order in which messages arrive.

Collectives inside layers match only if all ranks that share these layers are in the same pass. So
the first of these ranks chooses a pass by the messages that it has received, and broadcasts the
choice, in one byte; the others start this pass once they have the message for it. RRFP (arXiv
2605.18750) coordinates tensor groups in a message-driven pipeline for the same reason.

It cannot deadlock. The first rank starts only passes whose message it has. That message was sent by
the first rank of the adjacent stage, in a pass that was broadcast to the others of that stage, in
which they send theirs. So, by induction over the passes in the order in which first ranks start
them, every rank gets the message for each pass that is broadcast to it. Within a pass, all ranks of
the group call the same collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.distributed.rank_status import BackOff, this_rank
from lightning_axosparse.pipeline.choice import InFlightLimit
from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    Gradients,
    Link,
    Message,
    StageReads,
    detached_message,
)
from lightning_axosparse.pipeline.joining import sent_tensors
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.schedule import ForwardOnly, Op, PassKind, Schedule
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import (
    EMPTY,
    Batch,
    ProbingStep,
    StageStep,
    TrainingBatch,
    TrainingStageStep,
)
from lightning_axosparse.pipeline.step_end import (
    EndedStageStep,
    StepEnd,
    WholeStageStep,
    WholeStep,
)
from lightning_axosparse.pipeline.step_front import StepFront
from lightning_axosparse.support.object_trees import CannotPickle
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import see

S = TypeVar("S", bound=StageStep)

_KINDS: tuple[PassKind, ...] = get_args(PassKind)


class SharedOrder:
    """The order of passes on ranks that share layers: the first one chooses, the others follow.

    Args:
        leader: the first of these ranks.
        leads: whether that is this rank.
        broadcast: starts the broadcast of a tensor from the first rank.
    """

    def __init__(
        self, leader: int, leads: bool, broadcast: Callable[[Tensor], dist.Work | None]
    ) -> None:
        self._leader, self._leads, self._broadcast = leader, leads, broadcast
        self._kind = torch.zeros(1, dtype=torch.uint8)
        self._under_way: dist.Work | None = None
        self._next: PassKind | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> SharedOrder:
        """Create the order of the ranks of a group."""
        leader = dist.get_global_rank(group, 0)
        broadcast = partial(dist.broadcast, group_src=0, group=group, async_op=True)
        return cls(leader, dist.get_rank(group) == 0, broadcast)

    @property
    def awaited(self) -> str:
        """The broadcast that this rank awaits, in words; empty if none."""
        if self._leads or self._next:
            return ""
        return f"the next pass from rank {self._leader}, which shares its layers"

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start the next pass, if there is one; arguments as for :meth:`Schedule.start_next`."""
        if self._leads:
            op = schedule.start_next(activations, gradients)
            if op is not None:
                self._broadcast(torch.tensor([_KINDS.index(op.kind)], dtype=torch.uint8))
            return op
        self._next = kind = self._next or self._receive()
        if kind is None or not schedule.arrived(activations, gradients)[kind]:
            return None
        self._next = None
        return schedule.start(kind)

    def _receive(self) -> PassKind | None:
        """Return the next pass of the first rank, if its broadcast has arrived."""
        self._under_way = self._under_way or self._broadcast(self._kind)
        if self._under_way is None or not self._under_way.is_completed():
            return None
        self._under_way = None
        return _KINDS[int(self._kind)]


class StageRun:
    """The run of a batch through one stage; ``order`` is given if other ranks share its layers."""

    def __init__(
        self,
        stage: int,
        stages: int,
        schedule: Schedule,
        link: Link,
        passes: StageStep,
        order: SharedOrder | None = None,
    ) -> None:
        self.stage, self.schedule, self.passes = stage, schedule, passes
        self._order = order
        self.peak_in_flight = 0
        """Largest number of micro-batches that the stage has held."""
        self._first, self._last = stage == 0, stage == stages - 1
        self._link = link
        self._held: dict[int, tuple[Message | None, Sequence[Tensor]]] = {}
        forward_only = isinstance(schedule, ForwardOnly)
        link.begin(schedule.microbatches, 0 if forward_only else schedule.microbatches)

    def start_next(self) -> Op | None:
        """Receive the messages that have arrived, and start the pass that the schedule chooses."""
        link, schedule = self._link, self.schedule
        link.poll()
        activations = gradients = schedule.microbatches
        if not self._first:
            activations = schedule.forwards + len(link.activations)
        if not self._last:
            gradients = schedule.backwards + len(link.gradients)
        if self._order is None:
            return schedule.start_next(activations, gradients)
        return self._order.start_next(schedule, activations, gradients)

    def receive_activation(self) -> Message | None:
        """Return the next activation of the previous stage; None on the first stage."""
        return None if self._first else self._link.activations.popleft()

    def send_activation(
        self, microbatch: int, received: Message | None, activation: Activation
    ) -> None:
        """Send the activation of a forward pass, and hold the tensors for its backward pass."""
        sent: Sequence[Tensor] = ()
        if activation is not EMPTY:
            sent = sent_tensors(activation) if self._last else self._sent(activation)
        if self.schedule.held:
            self._held[microbatch] = received, sent
            self.peak_in_flight = max(self.peak_in_flight, len(self._held))

    def _sent(self, activation: Activation) -> Sequence[Tensor]:
        try:
            return self._link.send_activation(activation)
        except CannotPickle as error:
            raise MisconfigurationException(
                f"What layer {self.passes.name} gives to the next stage cannot be sent: {error}. "
                "Let it return what pickle takes: tensors, containers, dataclasses and objects "
                "without open files, locks or generators; or put both layers into one stage "
                "(balance=...)." + see("values-between-layers")
            ) from error

    def backward(self, microbatch: int) -> None:
        """Run a backward pass, and send the gradients of the received activation back."""
        received, sent = self._held.pop(microbatch)
        gradients = None if self._last else self._link.gradients.popleft().content
        factor = cast(TrainingStageStep, self.passes).backward(microbatch, sent, gradients)
        if received is not None:
            leaves = [leaf.grad for leaf in received.tensors]
            self._link.send_gradient(Gradients(leaves, factor))

    def awaited(self) -> str:
        """Return the messages without which this stage cannot continue, in words."""
        if self._order is not None and self._order.awaited:
            return self._order.awaited
        missing, forwards, backwards = [], self.schedule.forwards, self.schedule.backwards
        if not self._first and forwards < self.schedule.microbatches:
            source = this_rank().rank + 1
            missing.append(f"the activation of micro-batch {forwards} from rank {source}")
        if not self._last and backwards < forwards:
            source = this_rank().rank - 1
            missing.append(f"the gradient of micro-batch {backwards} from rank {source}")
        return " or ".join(missing)

    def end(self) -> None:
        """Wait until all sends have completed."""
        self._link.end()


def run(stages: Sequence[StageRun]) -> None:
    """Run stages of this process to the end of the batch."""
    rank = this_rank()
    unfinished = [stage for stage in stages if not stage.schedule.finished]
    while unfinished:
        stage, (kind, microbatch) = _startable(unfinished) or _awaited(unfinished)
        rank.begin_pass(kind, microbatch)
        with clock.span(kind, stage.stage, microbatch):
            if kind == "forward":
                received = stage.receive_activation()
                output = stage.passes.forward(microbatch, received)
                stage.send_activation(microbatch, received, output)
                # So that they are freed with the backward pass.
                del received, output
            else:
                stage.backward(microbatch)
        if stage.schedule.finished:
            unfinished.remove(stage)
    for stage in stages:
        stage.end()


def _awaited(stages: Sequence[StageRun]) -> tuple[StageRun, Op]:
    """Wait for messages until a stage can run a pass; return the stage and the pass."""
    first = stages[0]
    with clock.span("wait", first.stage), BackOff(first.awaited) as back_off:
        while (startable := _startable(stages)) is None:
            back_off.pause()
    return startable


def _startable(stages: Sequence[StageRun]) -> tuple[StageRun, Op] | None:
    """Return the first stage that can run a pass, and the pass; None if there is none."""
    for stage in stages:
        op = stage.start_next()
        if op is not None:
            return stage, op
    return None


class Pipeline:
    """The stages of this process.

    Args:
        layers: the layers of all stages.
        links: for each stage of this process, its link to adjacent stages.
        schedule: schedule of training.
        limit: the in-flight limit.
        rng: seeds the random numbers of a batch.
        gather: returns the values of all ranks of the pipeline.
        order: the order of passes, if other ranks share layers with this one.
        outer_parameters: returns the parameters outside the layers.
    """

    def __init__(
        self,
        layers: PipelinedLayers,
        links: Mapping[int, Link],
        schedule: type[Schedule],
        limit: InFlightLimit,
        rng: PipelineRNG,
        gather: Callable[[Any], list[Any]],
        order: SharedOrder | None = None,
        outer_parameters: Callable[[], Collection[nn.Parameter]] = list,
    ) -> None:
        self._shared_order = order
        self.limit, self._schedule = limit, schedule
        self.peak_in_flight: dict[int, int] = {}
        """Largest number of micro-batches that each stage held in the last training batch."""
        self._layers, self._links = layers, links
        self._rng, self._gather = rng, gather
        self._outer_parameters = outer_parameters
        self._stages = len(layers.parts)

    @property
    def is_divided(self) -> bool:
        """Whether there are several stages."""
        return self._stages > 1

    def train(
        self,
        batch: TrainingBatch,
        by_parts: Callable[..., TrainingStageStep] | None = None,
    ) -> tuple[TrainingStageStep | None, bool]:
        """Run a training step forward and backward.

        Args:
            batch: the batch.
            by_parts: makes the step of the last stage that differentiates by parts; None to
                differentiate the loss of the whole batch.

        Returns:
            The last stage's step; None on other ranks. And whether the gradients are dropped, as
            the batch has to run again.
        """
        self.limit.begin_batch(held=len(batch.microbatches) if by_parts is None else 0)
        order = self._order(self._schedule, batch, forwards_first=by_parts is None)
        first = min(self._links)
        front = self._front(batch)
        steps: dict[int, TrainingStageStep] = {}
        for stage in self._links:
            make: Callable[..., TrainingStageStep] = TrainingStageStep
            if stage == self._stages - 1:
                make = by_parts or (EndedStageStep if self.is_divided else WholeStageStep)
            has_front = front is not None and stage == 0
            steps[stage] = make(
                *(stage, batch, self._layers, self._rng, front.of if front else _as_they_are),
                limit=self.limit,
                is_first_here=stage == first,
                deferred=self._outer_parameters() if has_front else (),
                end_backward=front.backward if front and has_front else _nothing,
            )
        runs = self._runs(steps, order)
        with self._layers.backwards_followed():
            if front is not None:
                front.run()
            run(runs)
        self.peak_in_flight = {each.stage: each.peak_in_flight for each in runs}
        return steps.get(self._stages - 1), steps[first].is_void

    def evaluate(self, batch: Batch) -> Any:
        """Run a step forward only.

        Returns:
            The output of the step on the last stage; None on other ranks.

        Raises:
            RunAgain: on the last stage, if the batch has to run again.
        """
        if not self.is_divided:
            with self._layers.backwards_followed():
                return WholeStep(0, batch, self._layers, self._rng).run()
        last = self._stages - 1
        kinds: dict[int, type[StageStep]] = {last: KeepingStep}
        steps = self.forward(
            batch, lambda stage, *shared: kinds.get(stage, StageStep)(stage, *shared)
        )
        if not isinstance(passed := steps.get(last), KeepingStep):
            return None
        end = StepEnd(batch, self._layers, self._rng)
        with self._layers.backwards_followed(), clock.span("forward", last):
            return end.run(passed.activations, may_call_none=True)

    def forward(self, batch: Batch, make: Callable[..., S]) -> dict[int, S]:
        """Run the forward passes of micro-batches.

        Args:
            batch: the batch.
            make: makes the step of a stage.

        Returns:
            The steps of the stages of this process.
        """
        front = self._front(batch)
        shared = batch, self._layers, self._rng, front.of if front else _as_they_are
        steps = {stage: make(stage, *shared) for stage in self._links}
        with self._layers.backwards_followed():
            if front is not None:
                front.run()
            run(self._runs(steps, self._order(ForwardOnly, batch)))
        return steps

    def probe(self, batch: Batch) -> dict[int, StageReads]:
        """Run the first micro-batch forward, and return the values that each stage reads of others.

        Collective over the pipeline. Gradients are not computed, but the graph is, as the behaviour
        of a step may depend on it.
        """
        one = batch.microbatches[0]._replace(number=0)
        batch = replace(batch, microbatches=[one], crossing=None)
        steps = {n: ProbingStep(n, batch, self._layers, self._rng) for n in self._links}
        with self._layers.backwards_followed():
            run(self._runs(steps, self._order(ForwardOnly, batch)))
            reads = {stage: step.reads for stage, step in steps.items()}
            if self._stages - 1 in steps:
                reads[self._stages] = self._read_by_end(batch, steps[self._stages - 1])
        gathered = self._gather(reads)
        return {stage: each for others in gathered for stage, each in others.items()}

    def _read_by_end(self, batch: Batch, last: ProbingStep) -> StageReads:
        """Return the values of the stages that the end of the step reads."""
        reads, activation = StageReads(), last.activation
        if activation is None or activation.has_failed or activation.is_empty:
            return reads
        message = detached_message(activation)[1]
        try:
            with batch.effects.read():
                end = StepEnd(batch, self._layers, self._rng)
                end.rehearse(batch.microbatches[0], message, reads=reads)
        except Exception:  # The step raises it again when it runs.
            return reads
        reads.is_complete = True
        return reads

    def _front(self, batch: Batch) -> StepFront | None:
        """Create the run of the code before the layers; None if another process runs it."""
        if 0 not in self._links or not self.is_divided:
            return None
        return StepFront(batch, self._layers, self._rng)

    def _order(
        self, schedule: type[Schedule], batch: Batch, forwards_first: bool = False
    ) -> dict[int, Schedule]:
        """Create the schedule of each stage of this process for a batch."""
        shared = self._stages, len(batch.microbatches), self.limit.value, forwards_first
        return {stage: schedule(stage, *shared) for stage in self._links}

    def _runs(
        self, steps: Mapping[int, StageStep], order: Mapping[int, Schedule]
    ) -> list[StageRun]:
        return [
            StageRun(
                stage, self._stages, order[stage], self._links[stage], step, self._shared_order
            )
            for stage, step in steps.items()
        ]


class KeepingStep(StageStep):
    """The forward passes of one stage, which keeps its activations.

    Attributes:
        activations: one for each micro-batch.
    """

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self.activations: list[Activation] = []

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step on a micro-batch, up to the next stage's first layer."""
        self.activations.append(super().forward(microbatch, received))
        return self.activations[-1]


def _as_they_are(part: MicroBatch) -> None:
    """Return no replacement for the first layer's inputs."""


def _nothing() -> None:
    pass
