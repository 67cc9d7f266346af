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

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast, get_args

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.distributed.rank_status import BackOff, this_rank
from lightning_axosparse.pipeline.crossing.message import (
    EMPTY,
    Activation,
    Gradients,
    Link,
    Message,
)
from lightning_axosparse.pipeline.joining import sent_tensors
from lightning_axosparse.pipeline.schedule import ForwardOnly, Op, PassKind, Schedule
from lightning_axosparse.pipeline.stage_step import StageStep, TrainingStageStep
from lightning_axosparse.support.object_trees import CannotPickle
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import see

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
        schedule: Schedule,
        link: Link,
        passes: StageStep,
        order: SharedOrder | None = None,
    ) -> None:
        self.stage, self.schedule, self.passes = schedule.stage, schedule, passes
        self._order = order
        self.peak_in_flight = 0
        """Largest number of micro-batches that the stage has held."""
        self._first, self._last = self.stage == 0, self.stage == schedule.stages - 1
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
        rerun = cast(TrainingStageStep, self.passes).backward(microbatch, sent, gradients)
        if received is not None:
            leaves = [leaf.grad for leaf in received.tensors]
            self._link.send_gradient(Gradients(leaves, rerun))

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
