"""Measures the time of each activity of this rank, as totals and as recorded spans.

Times are monotonic, so corrections of the host's clock do not change a duration. They are aligned
with that clock once, so that spans of several ranks fit together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from time import perf_counter, time
from typing import Literal

Activity = Literal[
    "forward",
    "backward",
    "wait",
    "all-reduce",
    "optimizer",
    "densify",
    "compress",
]
PASSES: tuple[Activity, ...] = ("forward", "backward")
"""The activities in which a stage computes a micro-batch."""


@dataclass(frozen=True)
class Span:
    """One activity on one stage of a replica, from ``start`` to ``end`` (as of :func:`now`)."""

    activity: Activity
    start: float
    end: float
    stage: int
    microbatch: int | None
    replica: int = 0


_EPOCH = time() - perf_counter()


def now() -> float:
    """Return the seconds since 1970 by this host's clock, without later corrections of the clock.

    Processes of a host agree if they have started between the same corrections.
    """
    return _EPOCH + perf_counter()


class Clock:
    """Sums the seconds of each activity and, while recording, stores every span.

    Several threads of a backward pass may add at the same time.

    The time of ``densify`` and ``compress`` is also part of ``forward`` and ``backward``.
    """

    def __init__(self) -> None:
        self.totals: dict[Activity, float] = defaultdict(float)
        self._spans: list[Span] | None = None
        self._lock = Lock()

    @contextmanager
    def span(
        self, activity: Activity, stage: int = 0, microbatch: int | None = None
    ) -> Iterator[None]:
        """Add the time inside the context to ``activity``."""
        start = _EPOCH + perf_counter()
        try:
            yield
        finally:
            self.add(activity, start, _EPOCH + perf_counter(), stage, microbatch)

    def add(
        self,
        activity: Activity,
        start: float,
        end: float,
        stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        """Add the time from ``start`` to ``end`` (:func:`now`) to ``activity``."""
        with self._lock:
            self.totals[activity] += end - start
            if self._spans is not None:
                self._spans.append(Span(activity, start, end, stage, microbatch))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the context."""
        with self._lock:
            totals, spans = self.totals, self._spans
            self.totals, self._spans = defaultdict(float), None
        try:
            yield
        finally:
            with self._lock:
                self.totals, self._spans = totals, spans

    def start_recording(self) -> None:
        """Store every span from now on, until :meth:`stop_recording` is called."""
        self._spans = []

    def stop_recording(self) -> list[Span]:
        """Stop recording, and return the spans since :meth:`start_recording`."""
        with self._lock:
            spans, self._spans = self._spans or [], None
        return spans


clock = Clock()
"""The clock of this process. Every part of a step adds its time, and callbacks read it."""
