"""The callback that measures a run on all ranks and writes the report at its end."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_axosparse.callbacks.report.facts import (
    RankFacts,
    RunFacts,
    TicketDraw,
    ValidationLoss,
    Work,
)
from lightning_axosparse.callbacks.ticket_callback import (
    Period,
    period_of,
    ticket_callback_of,
)
from lightning_axosparse.callbacks.timeline import PipelineTimeline, folder_of, grid_of
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.module.parameters import state_bytes
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.regrid import Regridded
from lightning_axosparse.support.arguments import NONE, PATH, TEXT, checked
from lightning_axosparse.support.torch_internals import tensors_in
from lightning_axosparse.support.trace import Activity, clock


@dataclass
class _Measurements:
    """The measurements of this rank since the start of fit; ``recent`` is since the last log."""

    work: dict[Period, Work] = field(default_factory=dict)
    recent: Work = field(default_factory=Work)
    losses: list[Tensor | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    validations: list[ValidationLoss] = field(default_factory=list)
    tokens: float = 0


@dataclass(frozen=True)
class _Instant:
    """The time, the period, the clock's totals, and the regrid, if any, at one moment."""

    seconds: float
    period: Period
    totals: Mapping[Activity, float]
    regridded: Regridded | None

    @classmethod
    def now(cls, trainer: L.Trainer) -> _Instant:
        totals = dict(clock.totals)
        return cls(time.perf_counter(), period_of(trainer), totals, _regridded(trainer))


class TrainingReport(L.Callback):
    """Writes the losses, times and memory of a training, before and after the draw.

    At the end of ``fit``, and again after ``test``, the folder contains ``report.json``,
    ``report.html`` (one file with tables, plots and masks), the plots ``loss.png``,
    ``mask_distance.png`` and, with a :class:`PipelineTimeline` in the trainer, ``gantt.png``, and
    the ticket as ``ticket.pt``, if one was drawn or given. :attr:`facts` has the same as objects.

    The trainer's loggers get:

    - every ``log_every_n_steps`` batches: the seconds of a batch and of its parts, averaged over
      the ranks (``seconds_per_batch/waiting`` is the pipeline's bubble), the most micro-batches in
      flight on a stage (``in_flight``), and the bytes of gradients in an all-reduce, summed over
      the ranks (``reduced_bytes``);
    - after the first step, and after the first with a ticket: the bytes of the model state, summed
      over the ranks (``state_bytes``), and the density of each pruned weight (``density/NAME``);
    - at the end: the plots, if the logger takes images.

    Args:
        folder: output folder; None: the trainer's ``default_root_dir``.
        val_loss: name of the logged validation loss; for a language model, a mean in nats per byte,
            which is shown as perplexity and bits per byte, too, if batches begin with tokens.
        test_loss: name of the logged test loss.
        val_accuracy: name of the logged validation accuracy of a model that classifies; the report
            then has accuracies instead of perplexity and bits per byte.
        test_accuracy: name of the logged test accuracy.

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    needs_whole_weights: Literal[True] = True
    """Ranks may not have parts of weights."""

    @checked(
        MisconfigurationException,
        folder=PATH | NONE,
        val_loss=TEXT,
        test_loss=TEXT,
        val_accuracy=TEXT | NONE,
        test_accuracy=TEXT | NONE,
    )
    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        val_loss: str = "val_loss",
        test_loss: str = "test_loss",
        val_accuracy: str | None = None,
        test_accuracy: str | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.val_loss = val_loss
        self.test_loss = test_loss
        self.val_accuracy, self.test_accuracy = val_accuracy, test_accuracy
        self.facts: RunFacts | None = None
        self._measured = _Measurements()
        self._plots: list[str] = []
        """Plots, as blocks of the page."""
        self._masks: list[str] = []
        """Pictures of masks, as blocks of the page."""
        self._started: _Instant | None = None
        self._parameters = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":  # Later, the module is sharded, and weights may be sparse.
            self._parameters = sum(parameter.numel() for parameter in pl_module.parameters())

    @override
    def on_fit_start(self, *_: Any) -> None:
        self._measured = _Measurements()

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._started = _Instant.now(trainer)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        now, start = _Instant.now(trainer), self._started
        assert start is not None
        seconds = now.seconds - start.seconds
        if now.regridded is not None and start.regridded is None:
            seconds -= now.regridded.seconds
        activities = {
            name: total - start.totals.get(name, 0.0) for name, total in now.totals.items()
        }
        work = self._measured.work.setdefault(start.period, Work())
        for each in (work, self._measured.recent):
            each.add(seconds, activities, getattr(trainer.strategy, "peak_in_flight", {}))
        work.in_flight = max(work.in_flight, getattr(trainer.strategy, "in_flight", 0))
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # A tensor: to read its value, a GPU would have to end the step first.
            self._measured.losses.append(loss.detach() * trainer.accumulate_grad_batches)
        else:  # Batches may be skipped, by some replicas or all.
            self._measured.losses.append(None)
        self._measured.steps.append(trainer.global_step)
        grid = grid_of(trainer)
        if grid.stage == 0:
            self._measured.tokens += _tokens(batch) / grid.replicas_per_batch
        if self._measured.recent.steps == trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._log_recent(trainer)
        if now.period == start.period and (trainer.is_last_batch or work.steps == 1):
            optimizer = next(iter(trainer.optimizers), None)
            work.state = asdict(state_bytes(pl_module, optimizer))
            work.reduced_bytes = getattr(trainer.strategy, "reduced_bytes", 0)
            if work.steps == 1:
                _log_storage(trainer, work.state_bytes)

    def _log_recent(self, trainer: L.Trainer) -> None:
        self._measured.recent.reduced_bytes = getattr(trainer.strategy, "reduced_bytes", 0)
        _log_work(trainer, self._measured.recent)
        self._measured.recent = Work()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = _logged(trainer, self.val_loss)
        if loss is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._measured.validations.append(
                ValidationLoss(
                    trainer.current_epoch,
                    trainer.global_step,
                    loss,
                    period_of(trainer),
                    _logged(trainer, self.val_accuracy),
                )
            )

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        grid = grid_of(trainer)
        measured = self._measured
        losses = [None if loss is None else float(loss) for loss in measured.losses]
        local = RankFacts(
            grid.rank, grid.stage, grid.replica, measured.work, losses, measured.tokens
        )
        ranks = all_gather(local, dist.group.WORLD)
        self.facts = RunFacts(ranks, measured.steps, measured.validations)
        self.facts.regrid = _regridded(trainer)
        self.facts.parameters = self._parameters
        self.facts.about = _about(trainer, pl_module)
        pruning = ticket_callback_of(trainer)
        if pruning is not None:
            self.facts.distances = dict(pruning.distances)
            self.facts.threshold = pruning.search.threshold if pruning.search else None
            if pruning.ticket is not None:
                self.facts.draw = _draw(pruning.ticket, pruning.drawn_at)
        if trainer.is_global_zero:
            names = self._draw_pictures(trainer)
            self._write(trainer)
            folder = folder_of(trainer, self.folder)
            log_pictures(trainer.loggers, folder, names, trainer.global_step)

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = _logged(trainer, self.test_loss)
        if self.facts is not None and loss is not None:
            self.facts.test_loss = loss
            self.facts.test_accuracy = _logged(trainer, self.test_accuracy)
            if trainer.is_global_zero:
                self._write(trainer)

    def _draw_pictures(self, trainer: L.Trainer) -> list[str]:
        """Draw plots and masks, and save the plots and the ticket; return the plots' files."""
        # matplotlib takes long to import, and only this rank needs it.
        from lightning_axosparse.callbacks.report.page import (
            figure,
            mask_pictures,
            plots,
            save_plots,
        )

        assert self.facts is not None
        folder = folder_of(trainer, self.folder)
        timelines = (c for c in callbacks_of(trainer) if isinstance(c, PipelineTimeline))
        steps = [step for timeline in timelines for step in timeline.steps]
        pruning = ticket_callback_of(trainer)
        ticket = None if pruning is None else pruning.ticket
        if ticket is not None:
            ticket.save(folder / "ticket.pt")
        figures = plots(self.facts, steps)
        self._plots = [figure(name, plot) for name, plot in figures.items()]
        self._masks = mask_pictures(ticket)
        return save_plots(figures, folder)

    def _write(self, trainer: L.Trainer) -> None:
        """Write the numbers and the page."""
        from lightning_axosparse.callbacks.report.page import html

        assert self.facts is not None
        folder = folder_of(trainer, self.folder)
        self.facts.save(folder / "report.json")
        (folder / "report.html").write_text(html(self.facts, self._plots, self._masks))


def _about(trainer: L.Trainer, module: L.LightningModule) -> dict[str, str]:
    """Return the command, the model, the grid, the seed, the versions and the date."""
    grid = grid_of(trainer)
    program, *arguments = sys.argv
    versions = {"Python": platform.python_version(), "torch": torch.__version__}
    versions |= {"Lightning": L.__version__, "lightning_axosparse": version("lightning-axosparse")}
    return {
        "command": shlex.join([Path(program).name, *arguments]),
        "model": type(module).__name__,
        "grid": f"{grid.g_inter} stages x {grid.g_data} replicas",
        "seed": os.environ.get("PL_GLOBAL_SEED", "none"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _tokens(batch: Any) -> int:
    """Return the tokens of a batch: the entries of its first tensor, if these are 2-D integers."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.dim() >= 2), None)
    is_text = first is not None and first.dim() == 2 and first.dtype in _INTEGERS
    return first.numel() if first is not None and is_text else 0


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _regridded(trainer: L.Trainer) -> Regridded | None:
    return getattr(trainer.strategy, "regridded", None)


def _logged(trainer: L.Trainer, name: str | None) -> float | None:
    value = trainer.callback_metrics.get(name) if name is not None else None
    return None if value is None else float(value)


def _draw(ticket: Ticket | ChannelTicket, step: int | None) -> TicketDraw:
    return TicketDraw(
        ticket.pruning_ratio,
        sparsity=ticket.layer_sparsity() if isinstance(ticket, Ticket) else {},
        density=1 - ticket.sparsity,
        step=step,
        channels={} if isinstance(ticket, Ticket) else ticket.layer_channels(),
    )


def _log_storage(trainer: L.Trainer, state_bytes: int) -> None:
    """Log the bytes of the model state over all ranks, and the density of each pruned weight."""
    metrics: dict[str, float] = {"state_bytes": sum(all_gather(state_bytes, dist.group.WORLD))}
    pruning = ticket_callback_of(trainer)
    if pruning is not None and pruning.ticket is not None:
        sparsity = pruning.ticket.layer_sparsity()
        metrics |= {f"density/{name}": 1 - pruned for name, pruned in sparsity.items()}
    _log(trainer, metrics)


def _log_work(trainer: L.Trainer, work: Work) -> None:
    """Log the time, the micro-batches in flight and the reduced bytes of the last batches."""
    ranks = all_gather(work, dist.group.WORLD)
    peaks = [peak for rank in ranks for peak in rank.peak_in_flight.values()]
    metrics = {
        "seconds_per_batch/all": fmean(rank.seconds / rank.steps for rank in ranks),
        "in_flight": float(max(peaks, default=0)),
        "reduced_bytes": float(sum(rank.reduced_bytes for rank in ranks)),
    }
    for part in ranks[0].seconds_per_step():
        name = f"seconds_per_batch/{part.replace(', ', '_and_')}"
        metrics[name] = fmean(rank.seconds_per_step()[part] for rank in ranks)
    _log(trainer, metrics)


def _log(trainer: L.Trainer, metrics: dict[str, float]) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=trainer.global_step)


def log_pictures(loggers: Iterable[Any], folder: Path, names: Sequence[str], step: int) -> None:
    """Give the plots of the report to the loggers that take images.

    These are loggers with ``log_image``, such as Weights & Biases, or ``experiment.add_image``,
    such as TensorBoard.
    """
    from matplotlib.image import imread

    for logger in loggers:
        for name in names:
            path, key = folder / name, Path(name).stem
            if hasattr(logger, "log_image"):
                logger.log_image(key, [str(path)], step=step)
            elif hasattr(logger.experiment, "add_image"):
                logger.experiment.add_image(key, imread(path), step, dataformats="HWC")
