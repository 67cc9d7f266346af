"""What the steps of a run share on one grid of ranks: stages, logging and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from lightning.pytorch.plugins.precision import Precision

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.choice import InFlightLimit, ScheduleChoice
from lightning_axosparse.pipeline.engine import Pipeline, agreed_order
from lightning_axosparse.pipeline.loss.reductions import ReductionTracker
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.state.batch_state import BatchState
from lightning_axosparse.strategy.compat.callbacks import sync_advice_silenced
from lightning_axosparse.strategy.compat.gradients import (
    pipeline_precision,
    replace_backward,
    restore_precision,
    show_whole_gradients,
)
from lightning_axosparse.strategy.compat.logging import MicrobatchLog, MicrobatchPrint
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics
from lightning_axosparse.strategy.stages.stage_module import StageModule


class OpenPipeline:
    """What steps need on one grid of ranks; creating it is collective over the job.

    The fastest of the training schedules of these names is used. ``give_gradients`` gives
    parameters the gradients that a step has computed.
    """

    def __init__(
        self,
        stage_module: StageModule,
        limit: InFlightLimit,
        schedules: Sequence[str],
        precision: Precision,
        rng: PipelineRNG,
        give_gradients: Callable[[], None],
    ) -> None:
        module, grid, groups = stage_module.module, stage_module.grid, stage_module.groups
        self.stage_module = stage_module
        self.tracker = ReductionTracker(module.buffers())
        with ExitStack() as undo:  # What fails half-way is undone.
            undo.callback(restore_precision, precision)
            pipeline_precision(
                precision,
                groups.whole,
                groups.world,
                stage_module.counter(),
                stage_module.remote_gradients.forget_norms,
            )
            replace_backward(precision, give_gradients)
            if stage_module.parts:
                show_whole_gradients(precision, module.trainer, stage_module.parts.whole)
            links = stage_module.links(limit.largest)
            is_divided = len(stage_module.layers.parts) > 1
            choice = ScheduleChoice(
                schedules if is_divided else schedules[:1], partial(all_gather, group=groups.world)
            )
            self.pipeline = Pipeline(
                stage_module.layers,
                links,
                choice,
                limit,
                rng,
                self.tracker,
                stage_module.split,
                partial(all_gather, group=groups.inter),
                agreed_order(groups.ordered),
            )
            self.metrics = PipelinedMetrics(
                module,
                groups.inter,
                groups.data,
                last_stage_rank=grid.pipeline[-1],
                is_last_stage=stage_module.runs_last_stage,
            )
            if not stage_module.runs_last_stage:
                undo.callback(self.metrics.reset)
            undo.callback(self.metrics.detach)
            self.metrics.attach()
            self.log = MicrobatchLog(module, self.tracker)
            undo.enter_context(self.log.attached())
            if groups.across_batches is None:
                undo.enter_context(sync_advice_silenced())
            self.state = BatchState(
                module,
                stage_module.stages,
                stage_module.last_stage,
                stage_module.sharding.stage_of,
                groups.same_batch is not None,
                stage_module.device,
            )
            undo.enter_context(stage_module.layers.followed_by(self.state))
            self.prints = MicrobatchPrint(module)
            undo.enter_context(self.prints.attached())
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Undo what creating it changed in the module; metrics keep the states that count."""
        self._undo.close()

    def forget_batch(self) -> None:
        """Drop what was recorded of the last batch."""
        self.log.clear()
        self.prints.clear()
        self.tracker.forget()
        self.tracker.programs.clear()
