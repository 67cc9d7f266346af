"""Runs Lightning's steps on a whole batch: splits it, runs the pipeline, combines the results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.distributed.process_groups import gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.batch_fingerprint import BatchFingerprint, fingerprint
from lightning_axosparse.pipeline.engine import Pipeline
from lightning_axosparse.pipeline.in_flight import InFlightLimit
from lightning_axosparse.pipeline.loss_check import check_loss
from lightning_axosparse.pipeline.loss_weights import (
    LossRule,
    LossWeights,
    validate_losses,
    weigh_by,
)
from lightning_axosparse.pipeline.microbatch import MicroBatch, of_replica
from lightning_axosparse.pipeline.outputs import loss_alone, merge, with_loss
from lightning_axosparse.pipeline.reductions import ReductionTracker
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.schedule_choice import ScheduleRule
from lightning_axosparse.pipeline.stage_step import (
    Batch,
    StageStep,
    TrainingBatch,
    TrainingStageStep,
)
from lightning_axosparse.strategy.batch_splitting import BatchSplitter
from lightning_axosparse.strategy.filled_lists import advise_on_lists, list_lengths
from lightning_axosparse.strategy.lightning.gradients import (
    StashedGradients,
    gradients_are_seen,
    starts_accumulation,
)
from lightning_axosparse.strategy.lightning.logging import MicrobatchLog, sync_advice_silenced
from lightning_axosparse.strategy.lightning.loop_check import position
from lightning_axosparse.strategy.lightning.metrics import PipelinedMetrics
from lightning_axosparse.strategy.lightning.precision import (
    pipeline_precision,
    replace_backward,
    restore_precision,
    scale_loss,
)
from lightning_axosparse.strategy.lightning.printing import MicrobatchPrint
from lightning_axosparse.strategy.lightning.sampling import broadcast_seed
from lightning_axosparse.strategy.stage_module import StageModule


class OpenPipeline:
    """What steps need on one grid of ranks; creating it is collective over the job.

    Args:
        stage_module: the part of the module on this rank.
        limit: most micro-batches that a stage may hold.
        schedules: chooses the class of the training schedule.
        precision: the precision plugin.
        rng: random numbers of the pipeline.
        give_gradients: gives parameters the gradients that a step has computed.
    """

    def __init__(
        self,
        stage_module: StageModule,
        limit: InFlightLimit,
        schedules: ScheduleRule,
        precision: Precision,
        rng: PipelineRNG,
        give_gradients: Callable[[], None],
    ) -> None:
        module, grid, groups = stage_module.module, stage_module.grid, stage_module.groups
        self.stage_module = stage_module
        self.tracker = ReductionTracker(module.buffers())
        with ExitStack() as undo:  # What fails half-way is undone.
            held = stage_module.sharding.held()
            counted = {held[name] for name in stage_module.sharding.counted()}
            undo.callback(restore_precision, precision)
            pipeline_precision(
                precision,
                groups.inter,
                groups.world,
                counted.__contains__,
                stage_module.remote_gradients.forget_norms,
            )
            replace_backward(precision, give_gradients)
            links = stage_module.links(limit.largest)
            self.pipeline = Pipeline(
                stage_module.layers,
                links,
                schedules.choice(len(stage_module.layers.parts), groups),
                limit,
                rng,
                self.tracker,
                stage_module.split,
            )
            self.metrics = PipelinedMetrics(
                module,
                groups.inter,
                groups.data,
                last_stage_rank=grid.pipeline(grid.replica)[-1],
                is_last_stage=stage_module.runs_last_stage,
            )
            if not stage_module.runs_last_stage:
                undo.callback(self.metrics.reset)
            undo.callback(self.metrics.detach)
            self.metrics.attach()
            self.log = MicrobatchLog(module, self.tracker)
            undo.callback(self.log.detach)
            self.log.attach()
            if groups.across_batches is None:
                undo.enter_context(sync_advice_silenced())
            self.prints = MicrobatchPrint(module)
            undo.callback(self.prints.detach)
            self.prints.attach()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Undo what creating it changed in the module; metrics keep the states that count."""
        self._undo.close()

    def forget_batch(self) -> None:
        """Drop what was recorded of the last batch."""
        self.log.clear()
        self.prints.clear()
        self.tracker.forget()


class BatchGradients:
    """The gradients of one batch, from the losses of its micro-batches to their all-reduce.

    Args:
        trainer: the running Trainer.
        module: the user's module.
        precision: the pipeline's precision plugin.
        reducer: averages gradients over replicas; None to keep them local.
        stashed: the gradients of earlier batches.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        precision: Precision,
        reducer: GradientReducer | None,
        stashed: StashedGradients,
    ) -> None:
        self._trainer, self._module, self._precision = trainer, module, precision
        self._reducer, self._stashed = reducer, stashed
        self._factor = 1.0

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the weighted loss of a micro-batch as Lightning would."""
        loss = loss / self._trainer.accumulate_grad_batches
        self._module.backward(scale_loss(self._precision, loss))

    def begin_last(self, factor: float, deferred: Collection[nn.Parameter] = ()) -> None:
        """From now on, all-reduce gradients as soon as they are final.

        Args:
            factor: what the gradients of the whole batch are to be multiplied by.
            deferred: parameters whose gradients are final only when :meth:`mark_final` says so.
        """
        self._factor = factor
        if self._reducer is not None:
            # What `zero_grad` is going to clear is not reduced.
            adds = not starts_accumulation(self._trainer)
            self._reducer.arm(factor, self._stashed.earlier if adds else None, deferred)

    def mark_final(self, parameter: nn.Parameter) -> None:
        """All-reduce with the gradient of this parameter, which was deferred."""
        if self._reducer is not None:
            self._reducer.mark_final(parameter)

    def finish(self, parameters: Collection[nn.Parameter], waits: bool) -> None:
        """All-reduce the other gradients, and rescale those of this rank alone.

        Args:
            parameters: those of this rank.
            waits: whether to wait for the all-reduces.
        """
        reducer = self._reducer
        if reducer is not None:
            reducer.start_rest()
            if waits:
                reducer.wait_for(parameters)
        if self._factor != 1:
            for parameter in parameters:
                reduced = reducer is not None and parameter in reducer.parameters
                if parameter.grad is not None and not reduced:
                    parameter.grad.mul_(self._factor)


class StepRunner:
    """Runs the steps of a module whose layers are partitioned into stages.

    Creating it is collective over the job.

    Args:
        trainer: the running Trainer.
        precision: the pipeline's precision plugin.
        schedules: chooses the class of the training schedule.
        splitter: splits batches into micro-batches.
        rule: how the losses of micro-batches make up that of the batch.
        sends_outputs: whether every rank gets what steps return; else the last stage does, and the
            others get the loss.
        steps_in_parts: whether the optimizer waits for each part of the gradients before it uses
            it, by :meth:`StageModule.await_gradients`.
        stage_module: the part of the module on this rank.
        limit: most micro-batches that a stage may hold.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        precision: Precision,
        schedules: ScheduleRule,
        splitter: BatchSplitter,
        rule: LossRule,
        sends_outputs: bool,
        steps_in_parts: bool,
        stage_module: StageModule,
        limit: InFlightLimit,
    ) -> None:
        self._trainer, self._precision = trainer, precision
        self._schedules, self._splitter, self._rule = schedules, splitter, rule
        self._sends_outputs = sends_outputs
        self._warned: set[str] = set()
        self._stashed = StashedGradients(trainer)
        self._checks_loss = rule.check
        self._waits = not steps_in_parts or gradients_are_seen(trainer)
        _agree_on_seed(stage_module)
        stages = stage_module.last_stage + 1
        self._rng = PipelineRNG(torch.initial_seed(), stages, stage_module.device)
        self._open = self._opened(stage_module, limit)

    def open(self, stage_module: StageModule, limit: InFlightLimit) -> None:
        """Run the next steps on another grid of ranks; to be called after :meth:`close`.

        Args:
            stage_module: the part of the module on this rank.
            limit: most micro-batches that a stage may hold.
        """
        _agree_on_seed(stage_module)
        self._open = self._opened(stage_module, limit)

    def _opened(self, stage_module: StageModule, limit: InFlightLimit) -> OpenPipeline:
        return OpenPipeline(
            stage_module, limit, self._schedules, self._precision, self._rng, self._give_gradients
        )

    def close(self) -> None:
        """Give the module its own logging and metrics back, with the states that count."""
        self._open.close()

    @property
    def limit(self) -> InFlightLimit:
        """Most micro-batches that a stage may hold."""
        return self._open.pipeline.limit

    def measure_again(self) -> None:
        """Choose the in-flight limit and the schedule again, because the model became smaller."""
        self._open.pipeline.limit.measure_again()
        self._open.pipeline.choice.measure_again()

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._open.pipeline.peak_in_flight

    def metric_states_shared(self) -> AbstractContextManager[None]:
        """Give every rank the last stage's states of metrics inside the context; collective."""
        stage_module = self._open.stage_module
        collect = partial(stage_module.groups.all_gather_from_stage, stage=stage_module.last_stage)
        return self._open.metrics.states_shared(collect)

    def train(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` forward and backward.

        Returns:
            What it returned for the batch; before the last stage its loss.
        """
        run, stage_module = self._open, self._open.stage_module
        with this_rank().step(*position(self._trainer)):
            microbatches = self._splitter.split_to_train(batch, args, stage_module.groups)
            microbatches = self._weighted(microbatches)
            reducer = stage_module.step_reducer
            gradients = BatchGradients(
                self._trainer, stage_module.module, self._precision, reducer, self._stashed
            )
            training = self._training_batch(batch, args, kwargs, microbatches, gradients)
            parameters = stage_module.sharding.held().values()
            with torch.enable_grad(), self._stashed.around_step(parameters):
                if not training.microbatches:
                    # The other replicas of this batch may wait for its denominators.
                    last_stage = stage_module.runs_last_stage
                    gradients.begin_last(training.weights.factor() if last_stage else 1.0)
                lengths = list_lengths(stage_module.module)
                with run.metrics.batch(len(microbatches)):
                    last = run.pipeline.train(training)
                gradients.finish(parameters, self._waits)
            if stage_module.norms is not None:
                stage_module.norms.update(stage_module.groups.data)
            warnings = self._advise_on_lists(lengths)
            if last is not None and (warning := self._validate_losses(last, training)):
                warnings.append(warning)
            result = self._combine(last, microbatches, training.fingerprint, warnings)
            if self._checks_loss and len(microbatches) > 1:
                self._checks_loss = False
                if training.received and len(training.microbatches) == len(microbatches):
                    self._check_loss(training, batch)
            return result

    def evaluate(
        self,
        user_step: Callable[..., Any],
        precision: Callable[[], AbstractContextManager[None]],
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run one of the module's other steps forward.

        Args:
            user_step: ``validation_step``, ``test_step`` or ``predict_step`` of the module.
            precision: makes the context in which it runs.
            batch: the batch.
            args: the other arguments of the step.
            kwargs: its keyword arguments.

        Returns:
            What it returned for the batch; before the last stage its loss, except in prediction.
        """
        run = self._open
        with this_rank().step(*position(self._trainer)):
            microbatches = self._splitter.split_to_evaluate(batch, args, run.stage_module.groups)
            microbatches = self._weighted(microbatches)
            evaluated = Batch(
                step=user_step,
                args=args,
                kwargs=kwargs,
                precision=precision,
                microbatches=self._own(microbatches),
                fingerprint=self._fingerprint(batch),
                log=run.log,
                prints=run.prints.microbatch,
                weights_given=self._rule.weight is not None,
            )
            lengths = list_lengths(run.stage_module.module)
            with run.metrics.batch(len(microbatches)):
                last = run.pipeline.evaluate(evaluated)
            warnings = self._advise_on_lists(lengths)
            return self._combine(last, microbatches, evaluated.fingerprint, warnings)

    def _advise_on_lists(self, lengths: Mapping[str, int]) -> list[str]:
        """What to warn of, where the step has filled lists that other ranks read empty."""
        stage_module = self._open.stage_module
        if stage_module.is_whole or not stage_module.runs_last_stage:
            return []
        loop, *_ = position(self._trainer)
        return advise_on_lists(stage_module.module, lengths, loop)

    def _give_gradients(self) -> None:
        """Give the parameters the gradients that the step has computed."""
        self._stashed.restore()
        self._open.stage_module.remote_gradients.present()

    def _training_batch(
        self,
        batch: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        microbatches: Sequence[MicroBatch],
        gradients: BatchGradients,
    ) -> TrainingBatch:
        """What the stages of this rank need to train on a batch."""
        run, rule, own = self._open, self._rule, self._own(microbatches)
        return TrainingBatch(
            step=run.stage_module.module.training_step,
            args=args,
            kwargs=kwargs,
            precision=self._precision.train_step_context,
            microbatches=own,
            fingerprint=self._fingerprint(batch),
            log=run.log,
            prints=run.prints.microbatch,
            weights_given=rule.weight is not None,
            weights=LossWeights(
                own,
                sum(part.size for part in microbatches),
                "given" if rule.weight is not None else rule.loss,
                run.stage_module.groups.batch_replicas,
            ),
            backward=gradients,
            received=[] if self._checks_loss else None,
        )

    def _validate_losses(self, last: TrainingStageStep, training: TrainingBatch) -> str | None:
        """Check that the micro-batches' losses combine, unless the user says how they do.

        Returns:
            A warning, if they combine approximately.
        """
        parts, rule = training.microbatches, self._rule
        if len(parts) < 2 or rule.loss != "auto" or rule.weight is not None:
            return None
        return validate_losses(last.losses, [part.size for part in parts])

    def _fingerprint(self, batch: Any) -> BatchFingerprint:
        """What the ranks that are given this batch compare."""
        if self._open.stage_module.groups.same_batch is None:
            return BatchFingerprint()
        loop, epoch, index = position(self._trainer)
        return BatchFingerprint(fingerprint(batch), f"batch {index} of {loop} epoch {epoch}")

    def _weighted(self, microbatches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the weights that the user's rule gives them, if there is one."""
        if self._rule.weight is None or self._trainer.predicting:
            return microbatches
        return weigh_by(self._rule.weight, microbatches)

    def _own(self, microbatches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """The micro-batches that this replica computes, of those that replicas share."""
        grid = self._open.stage_module.grid
        return of_replica(microbatches, grid.part_of_batch, grid.replicas_per_batch)

    def _check_loss(self, training: TrainingBatch, batch: Any) -> None:
        """Compare this batch's loss with that of the batch as a whole, on the last stage."""
        run = self._open
        full_precision = str(self._trainer.precision).startswith(("32", "64"))
        with run.metrics.kept(), run.metrics.batch(len(training.microbatches)):
            check_loss(
                run.pipeline,
                training,
                batch,
                run.stage_module.module,
                tolerance=1e-3 if full_precision else 3e-2,
            )
        run.forget_batch()

    def _combine(
        self,
        last: StageStep | None,
        microbatches: Sequence[MicroBatch],
        fingerprint: BatchFingerprint,
        warnings: Sequence[str],
    ) -> Any:
        """Combine what the last stage's micro-batches returned and logged, for every stage.

        Args:
            last: the last stage's step, on the ranks that run it.
            microbatches: those of the whole batch.
            fingerprint: of the batch.
            warnings: what to warn of, once in a run.

        Returns:
            What the step returned for the batch, or its loss.
        """
        run, stage_module = self._open, self._open.stage_module
        sends_all = self._sends_outputs or self._trainer.predicting
        result: tuple[Any, Any, Any, Sequence[str]] = (None, None, None, ())
        if last is not None:
            sent = last.outputs if sends_all else [loss_alone(output) for output in last.outputs]
            outputs = self._gathered(sent, fingerprint)
            if outputs:
                output = merged(outputs, microbatches, 1.0)
                logged = run.log.combine(run.metrics.batch_value)
                result = logged, run.prints.combined(), output, warnings
        logged, printed, output, warnings = stage_module.groups.broadcast_to_same_batch(
            result, stage_module.last_stage
        )
        for warning in warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                rank_zero_warn(warning)
        run.log.replay(logged)
        run.prints.replay(printed)
        run.forget_batch()
        output = move_data_to_device(output, stage_module.device)
        if last is None or sends_all or not last.outputs:
            return output
        own = self._own(microbatches)
        share = sum(part.weight for part in own) / sum(part.weight for part in microbatches)
        return with_loss(merged(last.outputs, own, share), output)

    def _gathered(self, outputs: list[Any], fingerprint: BatchFingerprint) -> list[Any]:
        """The outputs of all replicas that share a batch, on the first; elsewhere none."""
        run, groups = self._open, self._open.stage_module.groups
        if groups.grid.replicas_per_batch == 1:
            return outputs
        outputs = move_data_to_device(outputs, "cpu")
        mine = fingerprint.fingerprint, outputs, run.log.recorded(), run.metrics.recorded()
        everyone = gather(mine, groups.batch_replicas)
        if not everyone:
            return []
        fingerprints = {groups.grid.replica + n: theirs[0] for n, theirs in enumerate(everyone)}
        fingerprint.compare(fingerprints, "replica")
        run.metrics.join([states for *_, states in everyone])
        for _, _, calls, _ in everyone[1:]:
            run.log.add(calls)
        return [output for _, outputs, _, _ in everyone for output in outputs]


def merged(outputs: Sequence[Any], microbatches: Sequence[MicroBatch], share: float) -> Any:
    """What a step returned for these micro-batches, which are this share of the batch."""
    weights = [part.weight / (share or 1.0) for part in microbatches]
    return merge(outputs, weights, [part.size for part in microbatches])


def _agree_on_seed(stage_module: StageModule) -> None:
    """Give all ranks that are given the same batches one random state; collective among them."""
    groups, grid = stage_module.groups, stage_module.grid
    broadcast_seed(groups.same_batch, grid.same_batch_ranks[0])
