"""Converts the recorded spans of a training step to a Gantt chart and to a Perfetto trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_axosparse.support.trace import Activity, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS: dict[Activity, str] = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "weight gradient": "#e45756",
    "wait": "#e4e4e4",
    "all-reduce": "#54a24b",
    "optimizer": "#b279a2",
    "densify": "#9ecae9",
    "compress": "#ffd8a8",
}
_PASSES: set[Activity] = {"forward", "backward", "weight gradient"}
INNER: set[Activity] = {"densify", "compress"}
"""What runs inside a pass."""


@dataclass(frozen=True)
class Placed:
    """A span and its replica."""

    replica: int
    span: Span


@dataclass(frozen=True)
class RecordedStep:
    """The spans of one training step on every rank; ``weights`` is "dense" or "sparse"."""

    epoch: int
    batch_idx: int
    weights: str
    spans: list[Placed]

    @property
    def start(self) -> float:
        """Start of the first span, in seconds of the wall clock."""
        return min((placed.span.start for placed in self.spans), default=0.0)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every (replica, stage) that has spans, in order."""
        return sorted({(placed.replica, placed.span.stage) for placed in self.spans})


def place(spans: Sequence[Span], replica: int, stage: int) -> list[Placed]:
    """Assign one rank's spans to its replica and to stages.

    A span without a micro-batch (all-reduce, densify, ...) has no stage of its own: it gets the
    stage of the pass that encloses it, else the rank's ``stage``. The two differ if one process
    runs several stages.
    """
    passes = [span for span in spans if span.activity in _PASSES]

    def stage_of(span: Span) -> int:
        if span.microbatch is not None:
            return span.stage
        enclosing = (p.stage for p in passes if p.start <= span.start and span.end <= p.end)
        return next(enclosing, stage)

    return [Placed(replica, replace(span, stage=stage_of(span))) for span in spans]


def chrome_trace(step: RecordedStep) -> dict[str, Any]:
    """Return the step in the Trace Event Format: a process per replica, a thread per stage."""
    events: list[dict[str, Any]] = []
    for replica in sorted({replica for replica, _ in step.rows}):
        events.append(_named("process_name", replica, 0, f"replica {replica}"))
    for replica, stage in step.rows:
        events.append(_named("thread_name", replica, stage, f"stage {stage}"))
    for placed in step.spans:
        span = placed.span
        events.append(
            {
                "ph": "X",
                "name": span.activity,
                "cat": step.weights,
                "pid": placed.replica,
                "tid": span.stage,
                "ts": (span.start - step.start) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {} if span.microbatch is None else {"micro-batch": span.microbatch},
            }
        )
    about = {"epoch": step.epoch, "batch": step.batch_idx, "weights": step.weights}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def plot_gantt(axes: Axes, step: RecordedStep) -> None:
    """Plot the step: one row per stage, one bar per span, labelled with its micro-batch."""
    from matplotlib.patches import Patch

    rows = {row: y for y, row in enumerate(step.rows)}
    end = max((placed.span.end for placed in step.spans), default=step.start) - step.start
    for placed in step.spans:
        span, y = placed.span, rows[placed.replica, placed.span.stage]
        inner = span.activity in INNER
        height, edge, layer = (0.3, 0, 2) if inner else (0.8, 0.3, 1)
        left, width = (span.start - step.start) * 1e3, (span.end - span.start) * 1e3
        colour = COLOURS[span.activity]
        axes.barh(y, width, height, left, color=colour, edgecolor="white", lw=edge, zorder=layer)
        if span.microbatch is not None and span.activity != "wait" and width > end * 1e3 / 60:
            axes.text(left + width / 2, y, str(span.microbatch), ha="center", va="bottom")
    axes.set_yticks(list(rows.values()), [f"replica {r}, stage {s}" for r, s in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1e3 or 1)
    axes.set_xlabel("ms")
    axes.set_title(f"epoch {step.epoch}, batch {step.batch_idx}: {step.weights} weights")
    used = [a for a in COLOURS if any(placed.span.activity == a for placed in step.spans)]
    if used:
        legend = [Patch(color=COLOURS[activity], label=activity) for activity in used]
        axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
