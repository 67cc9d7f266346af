"""The callback that records what every rank does in one training step: a trace and a chart."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_axosparse.callbacks.ticket_callback import Period, period_of
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.support.arguments import INDEX, NONE, PATH, checked
from lightning_axosparse.support.trace import PASSES, Activity, Span, clock
from lightning_axosparse.support.troubleshooting import require_cli, see

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Activity, str] = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "wait": "#e4e4e4",
    "all-reduce": "#54a24b",
    "optimizer": "#b279a2",
    "densify": "#9ecae9",
    "compress": "#ffd8a8",
}


@dataclass(frozen=True)
class RecordedStep:
    """The spans of one training step on every rank; ``period`` is empty in a simulation."""

    epoch: int
    batch_idx: int
    period: Period | Literal[""]
    spans: list[Span]

    @property
    def start(self) -> float:
        """Start of the first span, in seconds of the wall clock."""
        return min((span.start for span in self.spans), default=0.0)

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every (replica, stage) that has spans, in order."""
        return sorted({(span.replica, span.stage) for span in self.spans})


def assign_rows(spans: Sequence[Span], replica: int, stage: int) -> list[Span]:
    """Assign the spans of one rank to its replica, and to stages.

    A span without a micro-batch (all-reduce, densify, ...) gets the stage of the pass that encloses
    it, else ``stage``. These may differ, as one process may run several stages.
    """
    passes = [span for span in spans if span.activity in PASSES]

    def stage_of(span: Span) -> int:
        if span.microbatch is not None:
            return span.stage
        enclosing = (p.stage for p in passes if p.start <= span.start and span.end <= p.end)
        return next(enclosing, stage)

    return [replace(span, replica=replica, stage=stage_of(span)) for span in spans]


def chrome_trace(step: RecordedStep) -> dict[str, Any]:
    """Return the step in the Trace Event Format: a process per replica, a thread per stage."""
    events: list[dict[str, Any]] = []
    for replica in sorted({replica for replica, _ in step.rows}):
        events.append(_name_event("process_name", replica, 0, f"replica {replica}"))
    for replica, stage in step.rows:
        events.append(_name_event("thread_name", replica, stage, f"stage {stage}"))
    for span in step.spans:
        events.append(
            {
                "ph": "X",
                "name": span.activity,
                "cat": step.period,
                "pid": span.replica,
                "tid": span.stage,
                "ts": (span.start - step.start) * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {} if span.microbatch is None else {"micro-batch": span.microbatch},
            }
        )
    about = {"epoch": step.epoch, "batch": step.batch_idx, "weights": step.period}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def gantt(steps: Sequence[RecordedStep]) -> Figure:
    """Plot steps, one below the other, on one time axis."""
    from matplotlib.figure import Figure

    rows = [len(step.rows) or 1 for step in steps]
    figure = Figure(figsize=(6, 0.7 * len(steps) + 0.4 * sum(rows) + 0.6), layout="constrained")
    panels = figure.subplots(len(steps), squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    used: dict[str, Artist] = {}
    for axes, step in zip(panels, steps, strict=True):
        plot_gantt(axes, step)
        axes.label_outer()
        if legend := axes.get_legend():
            used |= {str(patch.get_label()): patch for patch in legend.legend_handles}
            legend.remove()
    figure.legend(handles=[*used.values()], loc="outside lower center", ncols=4, frameon=False)
    return figure


def plot_gantt(axes: Axes, step: RecordedStep) -> None:
    """Plot the step: one row per stage, one bar per span, labelled with its micro-batch."""
    from matplotlib.patches import Patch

    rows = {row: y for y, row in enumerate(step.rows)}
    end = max((span.end for span in step.spans), default=step.start) - step.start
    for span in step.spans:
        y = rows[span.replica, span.stage]
        inner = span.activity in ("densify", "compress")  # They run inside of passes.
        height, edge, layer = (0.3, 0, 2) if inner else (0.8, 0.3, 1)
        left, width = (span.start - step.start) * 1e3, (span.end - span.start) * 1e3
        colour = COLOURS[span.activity]
        axes.barh(y, width, height, left, color=colour, edgecolor="white", lw=edge, zorder=layer)
        if span.microbatch is not None and span.activity != "wait" and width > end * 1e3 / 40:
            axes.text(left + width / 2, y, str(span.microbatch), ha="center", va="bottom")
    axes.set_yticks(list(rows.values()), [f"replica {r}, stage {s}" for r, s in rows])
    axes.invert_yaxis()
    axes.margins(x=0)
    axes.set_xlabel("ms")
    axes.set_title(f"epoch {step.epoch}, batch {step.batch_idx}: {step.period} weights")
    used = [a for a in COLOURS if any(span.activity == a for span in step.spans)]
    if used:
        legend = [Patch(color=COLOURS[activity], label=activity) for activity in used]
        axes.legend(handles=legend, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


class PipelineTimeline(L.Callback):
    """Writes one training step of all ranks as a trace and as a Gantt chart.

    One batch of each epoch is recorded, and also the first two after the draw. When training ends,
    the last recorded step of each period is written: ``timeline-dense.json`` from before pruning,
    ``timeline-pruning.json`` from gradual pruning, and ``timeline-sparse.json`` from after the
    draw, which https://ui.perfetto.dev and chrome://tracing open. A chart, a ``.png`` of the same
    name, is beside each; :attr:`steps` has the steps as objects.

    Times are those of each host's wall clock.

    Args:
        batch_idx: index of the batch to record in an epoch. The first batch is seldom typical.
        epoch: the only epoch to record; None: every epoch.
        folder: output folder; None: the trainer's ``default_root_dir``.

    Raises:
        MisconfigurationException: if an argument is out of range.
        ModuleNotFoundError: if the extra ``cli`` is not installed, which draws the chart.
    """

    needs_whole_weights: Literal[True] = True
    """Ranks may not have parts of weights."""

    @checked(MisconfigurationException, batch_idx=INDEX, epoch=INDEX | NONE, folder=PATH | NONE)
    def __init__(
        self,
        batch_idx: int = 1,
        epoch: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        require_cli("PipelineTimeline")
        self.batch_idx = batch_idx
        self.epoch = epoch
        self.folder = None if folder is None else Path(folder)
        self.steps: list[RecordedStep] = []
        self._recorded: dict[Period, tuple[int, int, list[Span]]] = {}
        """Period -> epoch, index and spans on this rank of the last batch recorded in it."""
        self._after_draw = 0
        """The number of batches that have begun since the draw."""
        self._period: Period | None = None
        """The period of the batch that is being recorded; None if none is."""

    @override
    def on_train_start(self, *_: Any) -> None:
        self._recorded, self._after_draw = {}, 0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        period = period_of(trainer)
        self._after_draw += period == "sparse"
        is_due = batch_idx == self.batch_idx or self._after_draw in (1, 2)
        if is_due and self.epoch in (None, trainer.current_epoch):
            self._period = period
            clock.start_recording()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._period is not None:
            grid = grid_of(trainer)
            spans = assign_rows(clock.stop_recording(), grid.replica, grid.stage)
            self._recorded[self._period] = trainer.current_epoch, batch_idx, spans
            self._period = None

    @override
    def on_exception(self, *_: Any) -> None:
        clock.stop_recording()  # Stop recording, as this batch does not end.
        self._period = None

    @override
    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        own = {period: spans for period, (_, _, spans) in self._recorded.items()}
        ranks = all_gather(own, dist.group.WORLD)
        self.steps = [
            RecordedStep(
                epoch, batch_idx, period, [span for rank in ranks for span in rank[period]]
            )
            for period, (epoch, batch_idx, _) in self._recorded.items()
        ]
        if trainer.is_global_zero:
            self._write(folder_of(trainer, self.folder))

    def _write(self, folder: Path) -> None:
        if not self.steps:
            epoch = "any epoch" if self.epoch is None else f"epoch {self.epoch}"
            warnings.warn(
                f"PipelineTimeline recorded nothing: no batch_idx={self.batch_idx} in {epoch}."
                + see("callbacks"),
                stacklevel=2,
            )
        for step in self.steps:
            path = folder / f"timeline-{step.period}"
            path.with_suffix(".json").write_text(json.dumps(chrome_trace(step)))
            gantt([step]).savefig(path.with_suffix(".png"), dpi=200)


def grid_of(trainer: L.Trainer) -> Grid:
    """Return the strategy's grid; for other strategies, one of a single stage."""
    grid = getattr(trainer.strategy, "grid", None)
    return grid or Grid(trainer.world_size, g_inter=1, rank=trainer.global_rank)


def folder_of(trainer: L.Trainer, folder: Path | None) -> Path:
    """Return ``folder``, or else the trainer's ``default_root_dir``; create it if missing."""
    output = Path(trainer.default_root_dir) if folder is None else folder
    output.mkdir(parents=True, exist_ok=True)
    return output
