"""Runs Lightning's steps on a batch: splits it, runs the pipeline, shares gradients and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import GradientReducer
from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.backward.gradient_hooks import GradientHooks
from lightning_axosparse.pipeline.batch import Batch, BatchFingerprint, checksum
from lightning_axosparse.pipeline.batch_layout import validate_without_graph
from lightning_axosparse.pipeline.by_parts import PartedStageStep
from lightning_axosparse.pipeline.choice import InFlightLimit, MemoryInFlightLimit
from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.microbatch import MicroBatch, fewest_samples
from lightning_axosparse.pipeline.profile import StageTimes
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.rng import SampledNumbers
from lightning_axosparse.pipeline.schedule import SCHEDULES, MessageDriven
from lightning_axosparse.pipeline.stage_step import TrainingStageStep
from lightning_axosparse.strategy.compat.gradients import (
    StashedGradients,
    gradients_are_seen,
    scale_loss,
    starts_accumulation,
    tolerance_of,
)
from lightning_axosparse.strategy.compat.loaders import broadcast_seed, source
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.compat.logging import LogCall, of_batch, with_loss
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.batch_splitting import BatchSplitter, Share
from lightning_axosparse.strategy.step.effects import Changed
from lightning_axosparse.strategy.step.learning import LoaderSteps, StepLearner
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.strategy.step.outer_settings import Setting
from lightning_axosparse.strategy.step.whole_step import StepContext


@dataclass
class StepResult:
    """The results of the step on a batch, from the last stage; can be pickled.

    Attributes:
        output: the output of the step; on other ranks only its loss.
        calls: its log calls.
        changed: the changed attributes of the module.
        settings: the changed settings outside the module.
        warnings: about attributes that cannot be sent.
        generators: the states of the random generators after the step; None if unchanged.
        rerun: why the batch has to run again; None if it has not.
    """

    output: Any = None
    calls: Sequence[LogCall] = ()
    changed: Sequence[Changed] = ()
    settings: Sequence[Setting] = ()
    warnings: Sequence[str] = ()
    generators: Generators | None = None
    rerun: Rerun | None = None


@dataclass(frozen=True)
class BatchGradients:
    """Computes the gradients of one batch, calls the user's hooks, and averages over replicas.

    Attributes:
        module: the user's module.
        precision: scales the loss.
        reducer: all-reduces gradients over the replicas; None: they stay local.
        stashed: the gradients of earlier batches.
        hooks: the user's gradient hooks.
        share: the weight of this replica's loss, if replicas train on parts of one batch.
    """

    module: pl.LightningModule
    precision: Precision
    reducer: GradientReducer | None
    stashed: StashedGradients
    hooks: GradientHooks
    share: float

    def differentiate(self, loss: Tensor) -> None:
        """Differentiate the weighted loss of a micro-batch as Lightning would."""
        loss = loss / self.module.trainer.accumulate_grad_batches
        loss = loss if self.share == 1 else loss * self.share
        self.module.backward(scale_loss(self.precision, loss))

    def begin_last(self, deferred: Collection[nn.Parameter] = ()) -> None:
        """From now on, all-reduce gradients as soon as they are final.

        Args:
            deferred: parameters whose gradients are final only after :meth:`mark_final`.
        """
        if self.reducer is not None:
            self.reducer.prepare(self._earlier, {*deferred, *self.hooks.parameters})

    @property
    def _earlier(self) -> MutableMapping[nn.Parameter, Tensor | None] | None:
        """The gradients of earlier batches, unless `zero_grad` is going to clear them."""
        return None if starts_accumulation(self.module.trainer) else self.stashed.earlier

    def mark_final(self, parameter: nn.Parameter) -> None:
        """Include the final gradient of a deferred parameter in the all-reduce."""
        if self.reducer is not None and parameter not in self.hooks.parameters:
            self.reducer.mark_final(parameter)

    def call_hooks(self, sharing: dict[nn.Parameter, Any]) -> None:
        """Call the user's hooks with the gradients of the batch.

        Args:
            sharing: the parameters with hooks, and the ranks that have each a part of the gradient.
        """
        for parameter, group in reversed(sharing.items()):  # about the order of backward passes
            self.hooks.call(parameter, self._earlier or {}, group)

    def finish(self, waits: bool) -> None:
        """All-reduce the other gradients."""
        if self.reducer is not None:
            self.reducer.finish(waits)


class StepRunner:
    """Runs the steps of a module whose layers are partitioned into stages.

    Creating it is collective over the job. With ``steps_in_parts`` the optimizer itself waits for
    each part of the gradients, by :meth:`SharedParameters.wait_for`.
    """

    def __init__(
        self,
        config: Config,
        precision: Precision,
        free: Callable[[], int],
        steps_in_parts: bool,
        stage_module: StageModule,
    ) -> None:
        module, trainer = stage_module.module, stage_module.module.trainer
        fewest = fewest_samples(module) if config.microbatches is None else 1
        self._trainer, self._precision, self._free = trainer, precision, free
        self._in_flight = config.in_flight
        self._schedule = SCHEDULES[config.schedule]
        self.reduction = config.reduction
        """What the loss is; None: any function of the batch."""
        self.microbatch_count = config.microbatch_count
        """Wanted number of micro-batches in a batch."""
        self._splitter = BatchSplitter(trainer, self.microbatch_count, config.split_batch, fewest)
        self._tolerance = tolerance_of(precision, stage_module.device)
        self._learner = StepLearner(trainer, config.reduction, free, self._tolerance)
        self._stashed = StashedGradients(trainer)
        self._waits = not steps_in_parts or gradients_are_seen(trainer)
        self._compares_times = config.balance == "parameters"
        self.open(stage_module)

    def open(self, stage_module: StageModule) -> None:
        """Run the next steps on another grid of ranks; to be called after :meth:`close`."""
        # All ranks whose loaders return the same batches draw the same.
        grid, groups = stage_module.grid, stage_module.groups
        broadcast_seed(groups.same_loader, grid.same_batch_ranks[0])
        self._known: defaultdict[tuple[object, int], LoaderSteps] = defaultdict(LoaderSteps)
        # On a GPU, the clock measures only the launches of passes.
        is_timed = self._compares_times and stage_module.device.type == "cpu"
        self._times = StageTimes(groups.inter if is_timed else None)
        self._open = OpenPipeline(
            stage_module,
            self._new_limit(stage_module),
            self._schedule,
            self._precision,
            self._give_gradients,
        )

    def _new_limit(self, stage_module: StageModule) -> InFlightLimit:
        """Create the in-flight limit of a grid: the user's, or one that depends on memory."""
        stages = stage_module.last_stage + 1
        if self._in_flight is not None or stages == 1 or self._schedule is not MessageDriven:
            return InFlightLimit(self._in_flight or stages)
        return MemoryInFlightLimit(
            stages,
            stage_module.device,
            self._free,
            lambda: self._trainer.global_step,
            partial(all_gather, group=stage_module.groups.world),
        )

    def close(self) -> None:
        """Restore the module's own logging and metrics; metrics keep the last stage's states."""
        self._open.close()

    @property
    def limit(self) -> InFlightLimit:
        """The in-flight limit."""
        return self._open.pipeline.limit

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """Most micro-batches that each stage of this rank held in its last training batch."""
        return self._open.pipeline.peak_in_flight

    def run_step(
        self,
        user_step: Callable[..., Any],
        precision: StepContext,
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run a step of the module in the context of ``precision``, and backward in training.

        Returns:
            The output of the step; on ranks without the last stage its loss, except in prediction.
        """
        run, stage_module = self._open, self._open.stage_module
        stage_module.follow_changes()
        if run.follow_changes():
            self._known.clear()
        with this_rank().step(*position(self._trainer)):
            origin = source(self._trainer, args)
            reduction = self.reduction if self._trainer.training else None
            batch, share = self._splitter.own_part(batch, origin, stage_module.grid, reduction)
            microbatches = self._splitter.microbatches_of(batch, origin, stage_module.groups)
            step = Batch(
                step=user_step,
                args=args,
                kwargs=kwargs,
                precision=precision,
                layers=stage_module.layers,
                rng=run.rng,
                whole=MicroBatch(batch, sum(part.size for part in microbatches)),
                microbatches=microbatches,
                fingerprint=self._fingerprint(batch),
                effects=run.effects,
                # Else, ranks that share layers would wait for each other's collectives.
                may_fail=stage_module.groups.ordered is None,
            )
            known = self._known[origin.key]
            trained = partial(self._trained, share=share.loss)
            pass_through = trained if self._trainer.training else self._evaluated
            repeats = nullcontext() if share.samples else run.metrics.unchanged()
            with run.rng.batch(), repeats:
                run.effects.settings.begin_batch()
                run.effects.begin_batch()
                step = self._learner.begin_batch(run, known, step)
                result = pass_through(known, step)
                while result.rerun is not None:
                    step = self._learner.run_again(run, known, step, result.rerun)
                    result = pass_through(known, step)
                output = self._applied(result, share)
        stage_module.layers.record_modules()  # A step may change them on its own stage alone.
        return output

    def _trained(self, known: LoaderSteps, step: Batch, share: float) -> StepResult:
        """Train on a batch; return the results of the step, on all ranks of the replica."""
        run, stage_module = self._open, self._open.stage_module
        parameters = stage_module.sharding.local_parameters().values()
        hooks = GradientHooks(parameters)
        gradients = BatchGradients(
            stage_module.module,
            self._precision,
            stage_module.shared.step_reducer,
            self._stashed,
            hooks,
            share,
        )
        reduction = self.reduction if len(step.microbatches) > 1 else None
        if known.has_other_effects and not run.pipeline.is_divided:
            reduction = None  # Without layers, there is no end of the step to run on the batch.
        if known.reads_numbers:
            reduction = None  # Only the end of the step compares them.
        if stage_module.last_stage or reduction is not None:
            validate_without_graph(step.whole.batch)
        step = self._with_known(known, step, by_parts=reduction is not None)
        step = replace(step, backward=gradients)
        run.layer_state.begin_batch()
        with torch.enable_grad(), self._stashed.around_step(parameters):
            with hooks.set_aside(), self._times.batch():
                keeps, parted = known.has_other_effects, None
                if reduction is not None:
                    parted = partial(PartedStageStep, reduction=reduction, keeps=keeps)
                last, rerun = run.pipeline.train(step, parted)
            if rerun is not None:
                for parameter in parameters:
                    parameter.grad = None
                # Ranks may have different reasons, of micro-batches in flight.
                reasons = all_gather(rerun, stage_module.groups.replica)
                return StepResult(rerun=max(reasons, key=list(Rerun).index))
            result = self._result(last)
            if hooks.parameters:
                with run.rng.after_passes(stage_module.stages[-1]):
                    gradients.call_hooks(stage_module.shared.sharing_batch(hooks.parameters))
            gradients.finish(self._waits)
            stage_module.validate_replicated_gradients(self._tolerance)
        self._end_layers()
        return self._shared(result)

    def _result(self, last: TrainingStageStep | None) -> StepResult:
        """Return the results of the step, on the last stage; empty ones on other ranks."""
        if last is None:
            return StepResult()
        run = self._open
        if not isinstance(last, PartedStageStep):
            return self._step_result(last.output)
        if not last.activations:
            loss = last.loss
            output = {"loss": loss} if last.returns_mapping else loss
            return StepResult(output, with_loss(run.effects.part_calls, loss))
        return self._step_result(last.run_on_batch())

    def _step_result(self, output: Any) -> StepResult:
        """Return the results of the run that counts, on the last stage."""
        run = self._open
        # A frozen dataclass stays as it is, as in Lightning.
        output = apply_to_collection(output, Tensor, Tensor.detach, allow_frozen=True)
        changed, warnings = run.effects.changed()
        calls, settings = run.effects.log.calls, run.effects.settings.changes()
        return StepResult(output, calls, changed, settings, warnings, run.rng.keep())

    def _evaluated(self, known: LoaderSteps, step: Batch) -> StepResult:
        """Evaluate a batch; return the results of the step, on all ranks of the replica."""
        run = self._open
        run.layer_state.begin_batch()
        result = StepResult()
        try:
            output = run.pipeline.evaluate(self._with_known(known, step, by_parts=False))
            if run.stage_module.runs_last_stage:
                result = self._step_result(output)
        except RunAgain as error:
            result = StepResult(rerun=error.why)
        result = self._shared(result)
        if result.rerun is None:
            self._end_layers()
        return result

    def _end_layers(self) -> None:
        for text in self._open.layer_state.end_batch():
            self._learner.warn(text)

    def _shared(self, result: StepResult) -> StepResult:
        """Broadcast the result of the last stage in the replica, to the devices of its ranks.

        The last stage keeps its own output.
        """
        stage_module = self._open.stage_module
        groups, own = stage_module.groups, result.output
        if groups.replica is None:
            return result
        sends_all = self._trainer.predicting
        sent = own if sends_all else _loss_alone(own)
        sent = replace(result, output=move_data_to_device(sent, "cpu"))
        received = groups.broadcast_in_replica(sent, stage_module.last_stage)
        if stage_module.runs_last_stage:
            return replace(received, output=own)
        return replace(received, output=move_data_to_device(received.output, stage_module.device))

    def _of_batch(self, calls: Sequence[LogCall], share: Share) -> Sequence[LogCall]:
        """Combine what the replicas that have parts of a batch log: all get that of the batch.

        Else each would decide by values of its own about the rate, the best checkpoint, the end.
        """
        grid, groups = self._open.stage_module.grid, self._open.stage_module.groups
        if grid.replicas_per_batch == 1:
            return calls
        of_ranks = all_gather((grid.rank, share.samples, calls), groups.data)
        parts = [part for part in of_ranks if part[0] in grid.same_batch_ranks and part[1]]
        counted = [(of_part, samples) for _, samples, of_part in parts]
        strategy: Any = self._trainer.strategy  # Lightning adds up values of all replicas.
        replicas = grid.replicas_per_batch if strategy.is_distributed else 1
        return of_batch(calls, counted, share.size, replicas)

    def _applied(self, result: StepResult, share: Share) -> Any:
        """Apply the results of the step on this rank; return its output."""
        run = self._open
        if not run.stage_module.runs_last_stage:
            run.effects.apply(result.changed)
            run.effects.settings.apply(result.settings)
        if result.generators is not None:
            run.rng.adopt(result.generators)
        for text in result.warnings:
            self._learner.warn(text)
        with self._precision.forward_context():  # It determines the dtype of a logged number.
            run.effects.log.replay(self._of_batch(result.calls, share))
        return result.output

    def _with_known(self, known: LoaderSteps, step: Batch, by_parts: bool) -> Batch:
        """Add the known behaviour of the loader's steps to a batch."""
        stage_module = self._open.stage_module
        numbers: dict[int, SampledNumbers] = {}
        if known.draws:
            # By parts, code behind the layers draws for micro-batches, too.
            guesses = by_parts or known.drawn is None
            shared = step.whole.size, stage_module.device
            drawn = SampledNumbers(*shared, known.drawn or (), guesses)
            numbers = dict.fromkeys(range(stage_module.layers.end + 1), drawn)
        if not by_parts and stage_module.last_stage == 0:
            step = replace(step, microbatches=[step.whole])
        return replace(
            step,
            crossing=known.crossing,
            layouts=known.layouts,
            mixes=known.mixes,
            numbers=numbers,
            of_pass=self._open.layer_state.of_pass,
        )

    def _give_gradients(self) -> None:
        """Set the gradients of parameters to those that the step has computed."""
        self._stashed.restore()
        self._open.stage_module.remote_gradients.mark_present()

    def _fingerprint(self, batch: Any) -> BatchFingerprint:
        """Return the fingerprint that ranks with the same batch compare."""
        if self._open.stage_module.groups.replica is None:
            return BatchFingerprint()
        loop, epoch, index = position(self._trainer)
        return BatchFingerprint(checksum(batch), f"batch {index} of {loop} epoch {epoch}")


def _loss_alone(output: Any) -> Any:
    """Return the loss in an output, in the same structure: it is small whatever else is in it.

    One number gives itself, a mapping a dict with its "loss", if there is one, all else None.
    """
    if isinstance(output, Mapping):
        return {"loss": output["loss"]} if _is_number(output.get("loss")) else {}
    return output if _is_number(output) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1)
