"""TrainingReport: collects over the ranks what a run measured, and writes it down at its end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from typing_extensions import override

from lightning_axosparse.arguments import NONE, PATH, TEXT, checked
from lightning_axosparse.callbacks.context import (
    Period,
    callbacks_of,
    folder_of,
    gather,
    grid_of,
    period_of,
    search_of,
)
from lightning_axosparse.callbacks.facts import Draw, RankFacts, RunFacts, Validation, Work
from lightning_axosparse.callbacks.pictures import draw_pictures
from lightning_axosparse.callbacks.tables import markdown
from lightning_axosparse.callbacks.timeline import PipelineTimeline
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.regrid import Regridded
from lightning_axosparse.sparse.accounting import state_bytes
from lightning_axosparse.timing import clock


class TrainingReport(L.Callback):
    """Writes what training a language model cost and gave, before and after the ticket was drawn.

    At the end of ``fit``, and again after ``test``, the run's folder holds ``report.json``,
    ``report.md`` and the pictures ``loss.png``, ``mask_distance.png`` and, with a
    :class:`PipelineTimeline` in the trainer, ``gantt.png``. :attr:`facts` holds the same for code.

    Args:
        folder: where to write; None takes the trainer's ``default_root_dir``.
        val_loss: name of the logged validation loss, a mean in nats per byte.
        test_loss: name of the logged test loss.

    Raises:
        MisconfigurationException: for arguments out of range.
    """

    @checked(MisconfigurationException, folder=PATH | NONE, val_loss=TEXT, test_loss=TEXT)
    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        val_loss: str = "val_loss",
        test_loss: str = "test_loss",
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.val_loss = val_loss
        self.test_loss = test_loss
        self.facts: RunFacts | None = None

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._work: dict[Period, Work] = {}
        self._losses: list[Tensor] = []
        self._steps: list[int] = []
        self._validations: list[Validation] = []

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._totals = dict(clock.totals)
        self._regrid = _regrid(trainer)
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        work = self._work.setdefault(period_of(trainer), Work())
        work.steps += 1
        work.seconds += time.perf_counter() - self._start
        regrid = _regrid(trainer)
        if regrid is not None and self._regrid is None:
            work.seconds -= regrid.seconds
        for activity, total in clock.totals.items():
            spent = total - self._totals.get(activity, 0.0)
            work.activities[activity] = work.activities.get(activity, 0.0) + spent
        # Not read yet: on a GPU that would wait for the step to end.
        self._losses.append(outputs["loss"].detach() * trainer.accumulate_grad_batches)
        self._steps.append(trainer.global_step)
        for stage, held in getattr(trainer.strategy, "peak_in_flight", {}).items():
            work.peak_in_flight[stage] = max(held, work.peak_in_flight.get(stage, 0))
        if trainer.is_last_batch:
            work.state = asdict(state_bytes(pl_module, trainer.optimizers[0]))
            work.reduced_bytes = getattr(trainer.strategy, "reduced_bytes", 0)
            work.in_flight = getattr(trainer.strategy, "in_flight", 0)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = trainer.callback_metrics.get(self.val_loss)
        if loss is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validations.append(
                Validation(
                    trainer.current_epoch, trainer.global_step, float(loss), period_of(trainer)
                )
            )

    @override
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        grid = grid_of(trainer)
        losses = [float(loss) for loss in self._losses]
        mine = RankFacts(grid.rank, grid.stage, grid.replica, self._work, losses)
        search = search_of(trainer)
        self.facts = RunFacts(gather(mine), self._steps, self._validations)
        self.facts.regrid = _regrid(trainer)
        if search is not None:
            self.facts.distances = dict(enumerate(search.distances, start=2))
            self.facts.threshold = search.threshold
            if search.ticket is not None:
                self.facts.draw = _draw(search.ticket, self._work)
        self._write(trainer)

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loss = trainer.callback_metrics.get(self.test_loss)
        if self.facts is not None and loss is not None:
            self.facts.test_loss = float(loss)
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if self.facts is None or not trainer.is_global_zero:
            return
        folder = folder_of(trainer, self.folder)
        timelines = callbacks_of(trainer, PipelineTimeline)
        steps = [step for timeline in timelines for step in timeline.steps]
        self.facts.save(folder / "report.json")
        drawn = draw_pictures(self.facts, steps, folder)
        (folder / "report.md").write_text(markdown(self.facts, drawn))


def _regrid(trainer: L.Trainer) -> Regridded | None:
    return getattr(trainer.strategy, "regridded", None)


def _draw(ticket: Ticket, work: Mapping[Period, Work]) -> Draw:
    draw = Draw(ticket.pruning_ratio, ticket.layer_sparsity())
    if "dense" in work and ticket.epoch is not None:
        return replace(draw, epochs=ticket.epoch + 1, step=ticket.step)
    return draw
