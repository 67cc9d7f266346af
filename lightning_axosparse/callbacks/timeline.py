"""The callback that records what every rank does during one training step."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_axosparse.callbacks.gantt import (
    Placed,
    RecordedStep,
    chrome_trace,
    place,
    plot_gantt,
)
from lightning_axosparse.callbacks.period import Period, period_of
from lightning_axosparse.callbacks.trainer_info import folder_of, grid_of
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.support.arguments import INDEX, NONE, PATH, checked
from lightning_axosparse.support.trace import clock
from lightning_axosparse.support.troubleshooting import require_cli, see


class PipelineTimeline(L.Callback):
    """Writes one training step of all ranks as a trace and as a Gantt chart.

    Of the recorded steps the last one with dense weights and the last one with sparse weights are
    kept. For each of them the folder contains, when training ends, ``timeline-dense.json`` or
    ``timeline-sparse.json``, which https://ui.perfetto.dev and chrome://tracing open, and a
    ``.png`` of the same name; :attr:`steps` has them as objects.

    Times are those of each host's wall clock.

    Args:
        batch_idx: index of the batch to record in an epoch. The first batch is seldom typical.
        epoch: the only epoch to record; None: every epoch.
        folder: output folder; None: the trainer's ``default_root_dir``.

    Raises:
        MisconfigurationException: if an argument is out of range.
        ModuleNotFoundError: if the extra ``cli`` is not installed, which draws the chart.
    """

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
        self._recorded: dict[Period, tuple[int, list[Placed]]] = {}
        self._period: Period = "dense"
        """How weights are stored in the batch that is being recorded."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._recorded = {}

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._chosen(trainer, batch_idx):
            self._period = period_of(trainer)
            clock.record()

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._chosen(trainer, batch_idx):
            grid = grid_of(trainer)
            placed = place(clock.recorded(), grid.replica, grid.stage)
            self._recorded[self._period] = trainer.current_epoch, placed

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        clock.recorded()  # The batch that is being recorded has no end.

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        own = {period: spans for period, (_, spans) in self._recorded.items()}
        ranks = all_gather(own, dist.group.WORLD if dist.is_initialized() else None)
        self.steps = [
            RecordedStep(
                epoch, self.batch_idx, period, [span for rank in ranks for span in rank[period]]
            )
            for period, (epoch, _) in self._recorded.items()
        ]
        if trainer.is_global_zero:
            self._write(folder_of(trainer, self.folder))

    def _write(self, folder: Path) -> None:
        from matplotlib.figure import Figure

        if not self.steps:
            epoch = "any epoch" if self.epoch is None else f"epoch {self.epoch}"
            warnings.warn(
                f"PipelineTimeline recorded nothing: no batch_idx={self.batch_idx} in {epoch}."
                + see("callbacks"),
                stacklevel=2,
            )
        for step in self.steps:
            path = folder / f"timeline-{step.weights}"
            path.with_suffix(".json").write_text(json.dumps(chrome_trace(step)))
            figure = Figure(figsize=(12, 1.5 + 0.6 * len(step.rows)), layout="constrained")
            plot_gantt(figure.subplots(), step)
            figure.savefig(path.with_suffix(".png"), dpi=120)

    def _chosen(self, trainer: L.Trainer, batch_idx: int) -> bool:
        return batch_idx == self.batch_idx and self.epoch in (None, trainer.current_epoch)
