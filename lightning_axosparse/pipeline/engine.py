"""Runs batches through the stages of this process, whichever message arrives first.

Collectives inside layers match only if all ranks that share these layers are in the same pass. So
the first of them chooses by the messages that it has, and tells the others, in one byte; these
start what they were told once they have the message for it. RRFP (arXiv 2605.18750) coordinates
tensor groups in a message-driven pipeline for the same reason.

It cannot deadlock. The first rank starts only passes whose message it has. That message was sent by
the first rank of the adjacent stage, in a pass that the others of that stage have been told of, and
in which they send theirs. So, by induction over the passes in the order in which first ranks start
them, every rank gets the message for each pass that it is told of. Within a pass all ranks of the
group meet in the same collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast, get_args

import torch
import torch.distributed as dist

from lightning_axosparse.distributed.rank_status import BackOff, this_rank
from lightning_axosparse.pipeline.backward.split_layers import SplitLayers
from lightning_axosparse.pipeline.choice import InFlightLimit, ScheduleChoice
from lightning_axosparse.pipeline.crossing.message import (
    Crossing,
    Gradients,
    Link,
    learned,
    tensors,
)
from lightning_axosparse.pipeline.dry_run import DryRun, DryStep, Recomputed, Rehearsal
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.schedule import ForwardOnly, Op, PassKind, Schedule
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.pipeline.stage_step import (
    Batch,
    ProbingStep,
    StageStep,
    TrainingBatch,
    TrainingStageStep,
)
from lightning_axosparse.support.trace import clock

_KINDS: tuple[PassKind, ...] = get_args(PassKind)


class Order:
    """Starts what the schedule of a stage chooses."""

    @property
    def awaited(self) -> str:
        """What this rank waits for besides messages of adjacent stages, in words."""
        return ""

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start the next pass, if there is one; arguments as for :meth:`Schedule.start_next`."""
        return schedule.start_next(activations, gradients)


class LeadingOrder(Order):
    """The first rank of a group, whose schedule decides for all.

    Args:
        tell: tells the others the kind of a pass, without waiting for them.
    """

    def __init__(self, tell: Callable[[PassKind], None]) -> None:
        self._tell = tell

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start what the schedule chooses, and tell the others."""
        op = super().start_next(schedule, activations, gradients)
        if op is not None:
            self._tell(op.kind)
        return op


class FollowingOrder(Order):
    """Another rank of a group, which replays what the first one starts.

    Args:
        ask: returns the kind of the next pass, in the order in which they are told; None as long as
            it has not been told.
        leader: the first rank, in words.
    """

    def __init__(self, ask: Callable[[], PassKind | None], leader: str) -> None:
        self._ask, self._leader = ask, leader
        self._told: PassKind | None = None

    @property
    def awaited(self) -> str:
        """The next pass, until it has been told."""
        return "" if self._told else f"the next pass from {self._leader}, which shares its layers"

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start what was told, once the message for it is here."""
        self._told = self._told or self._ask()
        if self._told is None or not schedule.has_arrived(self._told, activations, gradients):
            return None
        op, self._told = schedule.start(self._told), None
        return op


class _Told:
    """Passes on their way from the first rank of a group, by broadcasts that nobody waits in."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._kind = torch.zeros(1, dtype=torch.uint8)
        self._under_way: dist.Work | None = None

    def tell(self, kind: PassKind) -> None:
        self._broadcast(torch.tensor([_KINDS.index(kind)], dtype=torch.uint8))

    def ask(self) -> PassKind | None:
        if self._under_way is None:
            self._under_way = self._broadcast(self._kind)
        if not self._under_way.is_completed():
            return None
        self._under_way = None
        return _KINDS[int(self._kind)]

    def _broadcast(self, kind: torch.Tensor) -> dist.Work:
        work: dist.Work | None = dist.broadcast(kind, group_src=0, group=self._group, async_op=True)
        assert work is not None
        return work


def agreed_order(group: dist.ProcessGroup | None) -> Order:
    """Who decides on the ranks of a group that share layers; None: each stage for itself."""
    if group is None:
        return Order()
    told = _Told(group)
    if dist.get_rank(group) == 0:
        return LeadingOrder(told.tell)
    return FollowingOrder(told.ask, f"rank {dist.get_global_rank(group, 0)}")


class StageRun:
    """The state of one stage in one batch."""

    def __init__(
        self,
        stage: int,
        stages: int,
        schedule: Schedule,
        link: Link,
        passes: StageStep,
        order: Order,
    ) -> None:
        self.stage, self.schedule, self.passes = stage, schedule, passes
        self._order = order
        self.peak_in_flight = 0
        """Most micro-batches that the stage has held, or that waited for weight gradients."""
        self._first, self._last = stage == 0, stage == stages - 1
        self._link = link
        self._held: dict[int, tuple[Any, Any]] = {}
        forward_only = isinstance(schedule, ForwardOnly)
        link.begin(schedule.microbatches, 0 if forward_only else schedule.microbatches)

    def start_next(self) -> Op | None:
        """Take in what has arrived and start what the schedule chooses, if anything."""
        link, schedule = self._link, self.schedule
        link.poll()
        activations = gradients = schedule.microbatches
        if not self._first:
            activations = schedule.forwards + len(link.activations)
        if not self._last:
            gradients = schedule.backwards + len(link.gradients)
        return self._order.start_next(schedule, activations, gradients)

    def receive_activation(self) -> Any:
        """The next activation of the previous stage; None on the first stage."""
        return None if self._first else self._link.activations.popleft()

    def send_activation(self, microbatch: int, received: Any, output: Any) -> None:
        """Send the output of a forward pass on, and keep what its backward pass needs."""
        if self.schedule.held:
            self._held[microbatch] = received, output
            kept = len(self._held) + self.schedule.pending
            self.peak_in_flight = max(self.peak_in_flight, kept)
        if not self._last:
            self._link.send_activation(output)

    def backward(self, microbatch: int) -> None:
        """Run a backward pass and send the gradients of what was received back."""
        received, output = self._held.pop(microbatch)
        gradients = None if self._last else self._link.gradients.popleft()
        factor = cast(TrainingStageStep, self.passes).backward(microbatch, output, gradients)
        if not self._first:
            leaves = [None if t is None else t.grad for t in tensors(received)]
            self._link.send_gradient(Gradients(leaves, factor))

    def make_weight_gradient(self, microbatch: int) -> None:
        """Make one of the weight gradients that backward passes have left."""
        if cast(TrainingStageStep, self.passes).make_weight_gradient(microbatch):
            self.schedule.end_weight_gradients()

    def awaited(self) -> str:
        """The messages without which this stage cannot continue, in words."""
        if self._order.awaited:
            return self._order.awaited
        missing, forwards, backwards = [], self.schedule.forwards, self.schedule.backwards
        if not self._first and forwards < self.schedule.microbatches:
            source = this_rank().rank - 1
            missing.append(f"the activation of micro-batch {forwards} from rank {source}")
        if not self._last and backwards < forwards:
            source = this_rank().rank + 1
            missing.append(f"the gradient of micro-batch {backwards} from rank {source}")
        return " or ".join(missing)

    def end(self) -> None:
        """Wait until everything sent has left."""
        self._link.end()


def run(stages: Sequence[StageRun]) -> None:
    """Run stages of this process to the end of the batch."""
    rank = this_rank()
    unfinished = [stage for stage in stages if not stage.schedule.finished]
    while unfinished:
        stage, (kind, microbatch) = _next(unfinished)
        rank.begin_pass(kind, microbatch)
        with clock.span(kind, stage.stage, microbatch):
            if kind == "forward":
                received = stage.receive_activation()
                output = stage.passes.forward(microbatch, received)
                stage.send_activation(microbatch, received, output)
                # Held no longer than the backward pass needs them.
                del received, output
            elif kind == "backward":
                stage.backward(microbatch)
            else:
                stage.make_weight_gradient(microbatch)
        if stage.schedule.finished:
            unfinished.remove(stage)
    for stage in stages:
        stage.end()


def _next(stages: Sequence[StageRun]) -> tuple[StageRun, Op]:
    """The stage that can run a pass, and the pass; waits for messages until there is one."""
    startable = _startable(stages)
    if startable is None:
        first = stages[0]
        with clock.span("wait", first.stage), BackOff(first.awaited) as back_off:
            while (startable := _startable(stages)) is None:
                back_off.pause()
    return startable


def _startable(stages: Sequence[StageRun]) -> tuple[StageRun, Op] | None:
    for stage in stages:
        op = stage.start_next()
        if op is not None:
            return stage, op
    return None


class Pipeline:
    """The stages of this process."""

    def __init__(
        self,
        layers: PipelinedLayers,
        links: Mapping[int, Link],
        choice: ScheduleChoice,
        limit: InFlightLimit,
        rng: PipelineRNG,
        tracker: ReductionTracker,
        split: SplitLayers,
        gather: Callable[[Any], list[Any]],
        agreed_order: Order,
    ) -> None:
        self._agreed_order = agreed_order
        self.limit, self.choice = limit, choice
        self.peak_in_flight: dict[int, int] = {}
        """Most micro-batches that each stage of this process held in its last training batch."""
        self._layers, self._links = layers, links
        self._rng, self._tracker, self._split, self._gather = rng, tracker, split, gather
        self._stages = len(layers.parts)

    def train(self, batch: TrainingBatch) -> TrainingStageStep | None:
        """Run a training step forward and backward.

        Returns:
            The last stage's step, which has the losses and the outputs; None on other ranks.
        """
        self.limit.begin_batch()
        schedule = self.choice.begin_batch()
        order = self._order(schedule, batch, batch.weights.adds_all_first)
        first, shared = min(self._links), (batch, self._layers, self._rng, self._tracker)
        steps = {
            stage: TrainingStageStep(
                stage,
                *shared,
                self.limit,
                self._split,
                order[stage].defers,
                is_first_here=stage == first,
            )
            for stage in self._links
        }
        runs = self._runs(steps, order)
        split = self._split.batch() if schedule.defers_weight_gradients else nullcontext()
        backwards = self._layers.backwards_followed()
        with self._rng.batch(), split, backwards, self.choice.timed():
            run(runs)
        if any(step.reordered_sums for step in steps.values()):
            self.choice.found_reordered_sums()
        self.peak_in_flight = {each.stage: each.peak_in_flight for each in runs}
        return steps.get(self._stages - 1)

    def evaluate(self, batch: Batch) -> StageStep | None:
        """Run a step forward only.

        Returns:
            The last stage's step, which has the outputs; None on other ranks.
        """
        shared = batch, self._layers, self._rng, self._tracker
        steps = {stage: StageStep(stage, *shared) for stage in self._links}
        with self._rng.batch(), self._layers.backwards_followed():
            run(self._runs(steps, self._order(ForwardOnly, batch)))
        return steps.get(self._stages - 1)

    def probe(self, batch: Batch) -> Crossing | None:
        """Run the first micro-batch of a step forward, and see what has to cross edges of stages.

        Collective over the pipeline. Gradients are not computed, but the graph is made, as what a
        step does may depend on it. Nothing but random generators is restored.

        Returns:
            What crosses; None if the run has not called all layers.
        """
        parts = batch.microbatches[:1]
        whole = replace(batch, microbatches=parts, crossing=None, is_shared=True)
        shared = whole, self._layers, self._rng, self._tracker
        steps = {stage: ProbingStep(stage, *shared) for stage in self._links}
        state, backwards = self._layers.followed_by(Recomputed()), self._layers.backwards_followed()
        with state, backwards, self._rng.generators_restored():
            run(self._runs(steps, self._order(ForwardOnly, whole)))
        gathered = self._gather({stage: step.reads for stage, step in steps.items()})
        return learned({stage: reads for others in gathered for stage, reads in others.items()})

    def dry_run(self, batch: Batch, rehearsal: Rehearsal) -> dict[int, DryRun]:
        """Run a step forward only, without a trace.

        Returns:
            What each stage of this rank has seen.
        """
        shared = batch, self._layers, self._rng, self._tracker
        steps = {stage: DryStep(stage, *shared, rehearsal=rehearsal) for stage in self._links}
        state, backwards = self._layers.followed_by(Recomputed()), self._layers.backwards_followed()
        with state, backwards, clock.paused(), self._rng.generators_restored():
            run(self._runs(steps, self._order(ForwardOnly, batch)))
        return {stage: step.run for stage, step in steps.items()}

    def _order(
        self, schedule: type[Schedule], batch: Batch, forwards_first: bool = False
    ) -> dict[int, Schedule]:
        """The schedule of each stage of this process in a batch."""
        shared = self._stages, len(batch.microbatches), self.limit.value, forwards_first
        return {stage: schedule(stage, *shared) for stage in self._links}

    def _runs(
        self, steps: Mapping[int, StageStep], order: Mapping[int, Schedule]
    ) -> list[StageRun]:
        return [
            StageRun(
                stage, self._stages, order[stage], self._links[stage], step, self._agreed_order
            )
            for stage, step in steps.items()
        ]
