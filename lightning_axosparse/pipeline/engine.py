"""Engine: runs the stages of this process through one batch, whatever message has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_axosparse.backoff import BackOff
from lightning_axosparse.pipeline.link import Link
from lightning_axosparse.pipeline.message import tensors
from lightning_axosparse.pipeline.schedule import ForwardOnly, Op, Schedule
from lightning_axosparse.timing import clock
from lightning_axosparse.whereabouts import here

Compute = Callable[[int, Any], Any]
"""``(microbatch, received) -> output``: one forward pass; on the last stage nothing is sent."""


class Gradients(NamedTuple):
    """What a stage sends back for a micro-batch.

    Attributes:
        tensors: the gradient of each leaf of the activation; None where there is none.
        factor: with the last micro-batch, what the gradients of the whole batch are still to be
            multiplied by (see ``loss_weights``).
    """

    tensors: list[Tensor | None]
    factor: float


Differentiate = Callable[[int, Any, "Gradients | None"], float]
"""``(microbatch, output, gradients) -> factor``: one backward pass; the last stage gets none."""


class StageEngine:
    """One stage's passage through one batch.

    Args:
        stage: index of the stage.
        stages: number of stages.
        schedule: decides what runs next.
        link: messages from and to the neighbours.
        compute: runs a forward pass.
        differentiate: runs a backward pass.
    """

    def __init__(
        self,
        stage: int,
        stages: int,
        schedule: Schedule,
        link: Link,
        compute: Compute,
        differentiate: Differentiate,
    ) -> None:
        self.stage = stage
        self.schedule = schedule
        self.peak_in_flight = 0
        self._first, self._last = stage == 0, stage == stages - 1
        self._link, self._compute, self._differentiate = link, compute, differentiate
        self._activations_used = 0
        self._gradients_used = 0
        self._live: dict[int, tuple[Any, Any]] = {}
        forward_only = isinstance(schedule, ForwardOnly)
        link.begin(schedule.microbatches, 0 if forward_only else schedule.microbatches)

    def start_next(self) -> Op | None:
        """Take in what has arrived and start what the schedule chooses, if anything."""
        self._link.poll()
        everything = self.schedule.microbatches
        activations = self._activations_used + len(self._link.activations)
        gradients = self._gradients_used + len(self._link.gradients)
        return self.schedule.start_next(
            everything if self._first else activations, everything if self._last else gradients
        )

    def run(self, op: Op) -> None:
        """Run one pass and send its result on."""
        here().begin_pass(op.kind, op.microbatch)
        with clock.span(op.kind, self.stage, op.microbatch):
            if op.kind == "forward":
                self._forward(op.microbatch)
            else:
                self._backward(op.microbatch)

    def awaited(self) -> str:
        """What this stage cannot go on without, in words."""
        missing, forwards, backwards = [], self.schedule.forwards, self.schedule.backwards
        if not self._first and forwards < self.schedule.microbatches:
            source = here().rank - 1
            missing.append(f"the activation of micro-batch {forwards} from rank {source}")
        if not self._last and backwards < forwards:
            source = here().rank + 1
            missing.append(f"the gradient of micro-batch {backwards} from rank {source}")
        return " or ".join(missing)

    def end(self) -> None:
        """Wait until everything sent has left."""
        self._link.end()

    def _forward(self, microbatch: int) -> None:
        received = None
        if not self._first:
            received = self._link.activations.popleft()
            self._activations_used += 1
        output = self._compute(microbatch, received)
        if self.schedule.held:
            self._live[microbatch] = received, output
            self.peak_in_flight = max(self.peak_in_flight, len(self._live))
        if not self._last:
            self._link.send_activation(output)

    def _backward(self, microbatch: int) -> None:
        received, output = self._live.pop(microbatch)
        gradients = None
        if not self._last:
            gradients = self._link.gradients.popleft()
            self._gradients_used += 1
        factor = self._differentiate(microbatch, output, gradients)
        if not self._first:
            leaves = [None if t is None else t.grad for t in tensors(received)]
            self._link.send_gradient(Gradients(leaves, factor))


def run(engines: Sequence[StageEngine]) -> None:
    """Run all stages of this process to the end of the batch."""
    while unfinished := [engine for engine in engines if not engine.schedule.finished]:
        engine, op = _next(unfinished)
        engine.run(op)
    for engine in engines:
        engine.end()


def _next(engines: Sequence[StageEngine]) -> tuple[StageEngine, Op]:
    work = _startable(engines)
    if work is None:
        first = engines[0]
        with clock.span("wait", first.stage), BackOff(first.awaited) as back_off:
            while (work := _startable(engines)) is None:
                back_off.pause()
    return work


def _startable(engines: Sequence[StageEngine]) -> tuple[StageEngine, Op] | None:
    for engine in engines:
        op = engine.start_next()
        if op is not None:
            return engine, op
    return None
