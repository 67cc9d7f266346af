"""Measures the time of each activity of this rank, as totals and as recorded spans."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Activity = Literal[
    "forward",
    "backward",
    "weight gradient",
    "wait",
    "all-reduce",
    "optimizer",
    "densify",
    "compress",
]


@dataclass(frozen=True)
class Span:
    """One activity on one stage, from ``start`` to ``end`` (seconds of this host's wall clock)."""

    activity: Activity
    start: float
    end: float
    stage: int
    microbatch: int | None


class Clock:
    """Sums the seconds of each activity and, while recording, keeps every span.

    ``densify`` and ``compress`` are parts of ``forward`` and ``backward``, and of their totals.
    """

    def __init__(self) -> None:
        self.totals: dict[Activity, float] = defaultdict(float)
        self._spans: list[Span] | None = None

    @contextmanager
    def span(
        self, activity: Activity, stage: int = 0, microbatch: int | None = None
    ) -> Iterator[None]:
        """Add the time inside the context to ``activity``."""
        start = time.time()
        try:
            yield
        finally:
            self.add(activity, start, time.time(), stage, microbatch)

    def add(
        self,
        activity: Activity,
        start: float,
        end: float,
        stage: int = 0,
        microbatch: int | None = None,
    ) -> None:
        """Add the time from ``start`` to ``end`` (``time.time()``) to ``activity``."""
        self.totals[activity] += end - start
        if self._spans is not None:
            self._spans.append(Span(activity, start, end, stage, microbatch))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the context."""
        totals, spans = self.totals, self._spans
        self.totals, self._spans = defaultdict(float), None
        try:
            yield
        finally:
            self.totals, self._spans = totals, spans

    def record(self) -> None:
        """Keep every span from now on, until :meth:`recorded` is called."""
        self._spans = []

    def recorded(self) -> list[Span]:
        """Stop recording and return the spans kept since :meth:`record`."""
        spans, self._spans = self._spans or [], None
        return spans


clock = Clock()
"""The clock of this process: every part of a step adds to it, and callbacks read it."""
