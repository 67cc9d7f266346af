"""Simulates one training step of one replica as discrete events.

The same :class:`~lightning_axosparse.pipeline.schedule.Schedule` objects as in the engine decide
which pass a stage runs next.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_axosparse.pipeline.schedule import Op, PassKind, Schedule
from lightning_axosparse.support.trace import Activity, Span
from lightning_axosparse.support.troubleshooting import see

_INSTANT = 1e-9
"""Events closer than this fraction of a mean pass are simultaneous: float sums along paths that
take equally long differ."""

Seconds = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, NDArray[np.float64])


@dataclass(frozen=True)
class Wire:
    """A simulated link between two stages; each direction carries one message at a time.

    Attributes:
        latency: seconds from the end of a message's transfer to its arrival.
        bandwidth: bytes per second.
        overhead: seconds that the sender itself is busy per message.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    overhead: float = 0.0


_IDEAL = Wire()


@dataclass(frozen=True)
class Simulation:
    """One simulated step; times are seconds from the start of the step.

    Attributes:
        spans: passes, waits, all-reduces and optimizer steps of all stages, ordered by start.
        busy: seconds that each stage spent in passes, shape ``(stages,)``.
        pipeline_end: end of each stage's last pass, shape ``(stages,)``.
        makespan: end of the whole step.
    """

    spans: list[Span]
    busy: Seconds
    pipeline_end: Seconds
    makespan: float

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline's time in which a stage waits, averaged over the stages."""
        return 1 - float(self.busy.mean() / self.pipeline_end.max())


def simulate(
    schedules: Sequence[Schedule],
    forward: ArrayLike,
    backward: ArrayLike,
    wires: Wire | Sequence[Wire] = _IDEAL,
    message_bytes: float = 0.0,
    all_reduce: ArrayLike = 0.0,
    optimizer: ArrayLike = 0.0,
) -> Simulation:
    """Simulate one step of one replica.

    Args:
        schedules: a new schedule for each stage, first stage first.
        forward: seconds of a forward pass: one number, one per stage ``(stages,)``, or one per
            stage and micro-batch ``(stages, microbatches)``.
        backward: seconds of a backward pass, likewise.
        wires: the link between neighbouring stages: one for all, or a list of ``stages - 1``.
        message_bytes: bytes of an activation, and of its gradient.
        all_reduce: seconds of the data-parallel all-reduce after a stage's last pass: one number or
            one per stage.
        optimizer: seconds of the optimizer step after that, likewise.

    Raises:
        ValueError: if a shape does not match the number of stages and micro-batches.
    """
    stages, microbatches = len(schedules), schedules[0].microbatches
    links = [wires] * (stages - 1) if isinstance(wires, Wire) else list(wires)
    if len(links) != stages - 1:
        raise ValueError(
            f"{len(links)} wires for {stages} stages: give one Wire for all, or {stages - 1}."
            + see("planning")
        )
    passes: dict[PassKind, Seconds] = {
        "forward": _matrix("forward", forward, stages, microbatches),
        "backward": _matrix("backward", backward, stages, microbatches),
    }
    events = _EventLoop(schedules, passes, links, message_bytes)
    events.run()
    end = events.idle_since.copy()
    tail: list[tuple[Activity, ArrayLike]] = [("all-reduce", all_reduce), ("optimizer", optimizer)]
    for activity, seconds in tail:
        for stage, duration in enumerate(np.broadcast_to(seconds, stages).tolist()):
            if duration:
                start = float(end[stage])
                end[stage] += duration
                events.spans.append(Span(activity, start, start + duration, stage, None))
    return Simulation(
        spans=sorted(events.spans, key=lambda span: span.start),
        busy=events.busy,
        pipeline_end=events.idle_since,
        makespan=float(end.max()),
    )


def ring_all_reduce(size: Numbers, ranks: int, bandwidth: float, latency: float = 0.0) -> Numbers:
    """Return the seconds of a ring all-reduce of ``size`` bytes: 2 (n - 1) steps of size / n.

    Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return 2 * (ranks - 1) * (size / ranks / bandwidth + latency)


def _matrix(name: str, seconds: ArrayLike, stages: int, microbatches: int) -> Seconds:
    array = np.asarray(seconds, dtype=np.float64)
    if array.ndim == 1:
        array = array[:, None]
    try:
        return np.broadcast_to(array, (stages, microbatches))
    except ValueError:
        raise ValueError(
            f"{name} has shape {array.shape}; give a number, {stages} numbers (one a stage) or "
            f"{stages} x {microbatches} (one a stage and micro-batch)." + see("planning")
        ) from None


class _EventLoop:
    """The state of all stages and links, and the queue of events."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        seconds: dict[PassKind, Seconds],
        wires: Sequence[Wire],
        message_bytes: float,
    ) -> None:
        stages, microbatches = len(schedules), schedules[0].microbatches
        self.spans: list[Span] = []
        self.busy = np.zeros(stages)
        self.idle_since = np.zeros(stages)
        self._schedules, self._seconds = schedules, seconds
        self._wires, self._message_bytes = wires, message_bytes
        self._running = [False] * stages
        self._arrived: dict[PassKind, list[int]] = {
            "forward": [microbatches] + [0] * (stages - 1),
            "backward": [0] * (stages - 1) + [microbatches],
        }
        self._wire_free: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = 0.0
        mean = float(np.mean([times.mean() for times in seconds.values()]))
        self._instant = mean * _INSTANT

    def run(self) -> None:
        """Process events in order; start passes on idle stages after all events of one instant."""
        stages = range(len(self._schedules))
        for stage in stages:
            self._start(stage)
        while self._events:
            self._process_one_instant()
            for stage in stages:
                if not self._running[stage]:
                    self._start(stage)

    def _process_one_instant(self) -> None:
        end = self._events[0][0] + self._instant
        while self._events and self._events[0][0] <= end:
            self._now, _, handle = heapq.heappop(self._events)
            handle()

    def _at(self, time: float, handle: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), handle))

    def _start(self, stage: int) -> None:
        schedule = self._schedules[stage]
        op = schedule.start_next(self._arrived["forward"][stage], self._arrived["backward"][stage])
        if op is None:
            return
        seconds = float(self._seconds[op.kind][stage, op.microbatch])
        receiver = _receiver(stage, op)
        if (wire := self._wire(stage, receiver)) is not None:
            seconds += wire.overhead
        waited_since = float(self.idle_since[stage])
        if self._now - waited_since > self._instant:
            self.spans.append(Span("wait", waited_since, self._now, stage, None))
        self.spans.append(Span(op.kind, self._now, self._now + seconds, stage, op.microbatch))
        self.busy[stage] += seconds
        self._running[stage] = True
        self._at(self._now + seconds, lambda: self._end(stage, op))

    def _end(self, stage: int, op: Op) -> None:
        self._running[stage] = False
        self.idle_since[stage] = self._now
        receiver = _receiver(stage, op)
        if (wire := self._wire(stage, receiver)) is None:
            return
        start = max(self._now, self._wire_free.get((stage, receiver), 0.0))
        left = start + self._message_bytes / wire.bandwidth
        self._wire_free[stage, receiver] = left
        self._at(left + wire.latency, lambda: self._arrive(receiver, op.kind))

    def _arrive(self, receiver: int, kind: PassKind) -> None:
        self._arrived[kind][receiver] += 1

    def _wire(self, sender: int, receiver: int) -> Wire | None:
        """Return the link between two neighbouring stages; None at the ends of the pipeline."""
        return self._wires[min(sender, receiver)] if 0 <= receiver < len(self._schedules) else None


def _receiver(stage: int, op: Op) -> int:
    """Return the stage to which a pass sends its result; the pipeline may have no such stage."""
    return stage + 1 if op.kind == "forward" else stage - 1
