"""Runs Lightning's steps on a whole batch: splits it, runs the pipeline, combines the results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_axosparse.distributed.process_groups import all_gather, gather
from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.pipeline.backward.parameter_gradients import GradientHooks
from lightning_axosparse.pipeline.choice import InFlightLimit, InFlightRule
from lightning_axosparse.pipeline.crossing.message import Crossing
from lightning_axosparse.pipeline.loss.outputs import loss_alone, merge, with_loss
from lightning_axosparse.pipeline.loss.terms import Term
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import (
    BatchFingerprint,
    MicroBatch,
    fewest_samples,
    fingerprint,
    of_replica,
    weigh_by,
)
from lightning_axosparse.pipeline.profile import StageTimes
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.stage_step import (
    Batch,
    StageStep,
    TrainingBatch,
)
from lightning_axosparse.pipeline.state.batch_state import Sent
from lightning_axosparse.pipeline.state.module_state import ModuleState, Place
from lightning_axosparse.strategy.compat.gradients import (
    StashedGradients,
    gradients_are_seen,
    tolerance_of,
)
from lightning_axosparse.strategy.compat.loaders import broadcast_seed, source
from lightning_axosparse.strategy.compat.lockstep import position
from lightning_axosparse.strategy.compat.logging import LoggedValue
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.stages.stage_module import StageModule
from lightning_axosparse.strategy.step.batch_gradients import BatchGradients
from lightning_axosparse.strategy.step.batch_splitting import BatchSplitter
from lightning_axosparse.strategy.step.check import StepCheck, without_trace
from lightning_axosparse.strategy.step.comparison import Compared, StepRules
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.strategy.step.whole_step import StepContext
from lightning_axosparse.support.messages import rank_zero_warn


class StepRunner:
    """Runs the steps of a module whose layers are partitioned into stages.

    Creating it is collective over the job. With ``steps_in_parts`` the optimizer itself waits for
    each part of the gradients before it uses it, by :meth:`StageModule.await_gradients`.
    """

    def __init__(
        self,
        config: Config,
        precision: Precision,
        in_flight: InFlightRule,
        steps_in_parts: bool,
        stage_module: StageModule,
    ) -> None:
        module, device = stage_module.module, stage_module.device
        trainer = module.trainer
        fewest = fewest_samples(module) if config.microbatches is None else 1
        self._trainer, self._precision, self._in_flight = trainer, precision, in_flight
        self._schedules = config.schedules(module, device)
        self._microbatch_weight = config.microbatch_weight
        self._weights_given = config.microbatch_weight is not None
        self.parts = config.parts * stage_module.grid.replicas_per_batch
        """Micro-batches that are wanted of a batch, for all replicas that share it."""
        self._splitter = BatchSplitter(trainer, self.parts, config.split_batch, fewest)
        self._sends_outputs = config.step_outputs == "all"
        self._warned: set[str] = set()
        self._crossings: dict[tuple[object, int], Crossing] = {}
        self._stashed = StashedGradients(trainer)
        self._compares = config.check_first_batch
        self._compared: defaultdict[tuple[object, int], Compared] = defaultdict(Compared)
        self._late: set[Place] = set()
        self._waits = not steps_in_parts or gradients_are_seen(trainer)
        self._tolerance = tolerance_of(precision, device)
        _agree_on_seed(stage_module)
        self._rng = PipelineRNG(torch.initial_seed(), config.g_inter, device)
        self._tells_times = config.balance == "parameters"
        self._open = self._opened(stage_module)

    def open(self, stage_module: StageModule) -> None:
        """Run the next steps on another grid of ranks; to be called after :meth:`close`."""
        _agree_on_seed(stage_module)
        self._crossings.clear()
        known = self._open.tracker.dims
        self._open = self._opened(stage_module)
        self._open.tracker.dims = known

    def _opened(self, stage_module: StageModule) -> OpenPipeline:
        # On a GPU, the clock sees when passes are launched.
        is_timed = self._tells_times and stage_module.device.type == "cpu"
        self._times = StageTimes(stage_module.groups.inter if is_timed else None)
        limit = self._in_flight.limit(stage_module.last_stage + 1, stage_module.groups)
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

    def train(
        self,
        user_step: Callable[..., Any],
        precision: StepContext,
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the module's ``training_step`` forward and backward, in the context of ``precision``.

        Returns:
            What it returned for the batch; before the last stage its loss.
        """
        run, stage_module = self._open, self._open.stage_module
        with this_rank().step(*position(self._trainer)):
            microbatches = self._splitter.split_to_train(batch, args, stage_module.groups)
            microbatches = self._weighted(microbatches)
            step = self._batch(user_step, precision, batch, args, kwargs, microbatches)
            compare = partial(self._check, step, batch, microbatches, trains=True)
            rules = self._compared[self._loader_of(step)].rules or compare()
            reducer = stage_module.step_reducer
            parameters = stage_module.sharding.held().values()
            hooks = GradientHooks(parameters)
            gradients = BatchGradients(
                stage_module.module, self._precision, reducer, self._stashed, hooks
            )
            weights = LossWeights(
                self._sizes(step.microbatches),
                sum(self._sizes(microbatches)),
                stage_module.groups.batch_replicas,
                "samples" if self._weights_given else rules.loss,
                rules.needs_batch,
                stage_module.groups.experts is not None,
            )
            training = TrainingBatch(**vars(step), weights=weights, backward=gradients)
            with torch.enable_grad(), self._stashed.around_step(parameters):
                if not training.microbatches:
                    # The other replicas of this batch may wait for its denominators.
                    last_stage = stage_module.runs_last_stage
                    gradients.begin_last(weights.factor() if last_stage else 1.0)
                run.state.begin_batch(rules.state, training.microbatches)
                with run.metrics.batch(len(microbatches)), hooks.set_aside():
                    with self._splitter.explained(args, batch), self._times.batch():
                        last = run.pipeline.train(training)
                if hooks.parameters:
                    with self._rng.after_passes(stage_module.stages[-1]):
                        gradients.call_hooks(stage_module.sharing_batch(hooks.parameters))
                gradients.finish(parameters, self._waits)
                stage_module.validate_replicated_gradients(self._tolerance)
            return self._combine(step, last, microbatches, rules, weights.terms, compare)

    def evaluate(
        self,
        user_step: Callable[..., Any],
        precision: StepContext,
        batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the module's ``validation_step``, ``test_step`` or ``predict_step`` forward.

        Returns:
            What it returned for the batch; before the last stage its loss, except in prediction.
        """
        run = self._open
        with this_rank().step(*position(self._trainer)):
            microbatches = self._splitter.split_to_evaluate(batch, args, run.stage_module.groups)
            microbatches = self._weighted(microbatches)
            step = self._batch(user_step, precision, batch, args, kwargs, microbatches)
            compare = partial(self._check, step, batch, microbatches, trains=False)
            rules = self._compared[self._loader_of(step)].rules or compare()
            run.state.begin_batch(rules.state, step.microbatches)
            explained = self._splitter.explained(args, batch)
            with run.metrics.batch(len(microbatches)), explained:
                last = run.pipeline.evaluate(step)
            return self._combine(step, last, microbatches, rules, (), compare)

    def _check(
        self, step: Batch, batch: Any, microbatches: Sequence[MicroBatch], trains: bool
    ) -> StepRules:
        """Compare a batch with its micro-batches; collective over the pipeline."""
        rules, compared = StepRules(), self._compared[self._loader_of(step)]
        used = compared.rules
        if self._compares:
            # Replicas that share the batch all run all of it, and go by what the first one finds.
            step = replace(step, microbatches=microbatches)
            check = StepCheck(self._open, step, batch, trains, self._tolerance, self._warned)
            if len(microbatches) > 1:
                rules = check.rules(self._in_flight.free, self._weights_given, used)
            elif not self._open.stage_module.is_whole:
                rules = check.changes()
            groups = self._open.stage_module.groups
            if groups.batch_replicas is not None:
                rules = groups.broadcast_to_same_batch(rules, self._open.stage_module.last_stage)
        compared.rules = rules if used is None else rules.besides(used)
        return compared.rules

    def _is_late(self, rules: StepRules, sent: Sequence[Sent]) -> bool:
        """Whether the step has changed what it did not in batches that were compared."""
        new = {each.place for each in sent} - rules.state.places - self._late
        self._late |= new
        return self._compares and bool(new)

    def _is_new(
        self, step: Batch, last: StageStep | None, rules: StepRules, losses: Sequence[Term]
    ) -> bool:
        """Whether the step has computed its values in a way that was not compared yet."""
        if last is None or not self._compares or len(step.microbatches) < 2:
            return False
        programs, calls = self._open.tracker.programs, self._open.log.calls()
        compared = self._compared[self._loader_of(step)]
        return not compared.is_enough(rules, programs, losses, calls, step.microbatches)

    def _loader_of(self, step: Batch) -> tuple[object, int]:
        origin = source(self._trainer, step.args)
        return origin.loop, origin.index

    def _with_crossing(self, step: Batch) -> Batch:
        """The batch with what crosses the edges of stages, seen before the first of its loader."""
        run, stage_module = self._open, self._open.stage_module
        key = self._loader_of(step)
        if stage_module.last_stage and step.microbatches and key not in self._crossings:
            state = ModuleState(stage_module.module)
            with without_trace(run), run.metrics.batch(1), state.watched():
                crossing = run.pipeline.probe(step)
            state.rewind()
            run.forget_batch()
            if crossing is not None:
                self._crossings[key] = crossing
        return replace(step, crossing=self._crossings.get(key))

    def _give_gradients(self) -> None:
        """Give the parameters the gradients that the step has computed."""
        self._stashed.restore()
        self._open.stage_module.remote_gradients.present()

    def _batch(
        self,
        user_step: Callable[..., Any],
        precision: StepContext,
        batch: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        microbatches: Sequence[MicroBatch],
    ) -> Batch:
        """What the stages of this rank need to run a step on a batch."""
        run, grid = self._open, self._open.stage_module.grid
        step = Batch(
            step=user_step,
            args=args,
            kwargs=kwargs,
            precision=precision,
            microbatches=of_replica(microbatches, grid.part_of_batch, grid.replicas_per_batch),
            fingerprint=self._fingerprint(batch),
            log=run.log.microbatch,
            prints=run.prints.microbatch,
            weights_given=self._weights_given,
            is_shared=len(run.stage_module.stages) > 1,
        )
        return self._with_crossing(step)

    def _fingerprint(self, batch: Any) -> BatchFingerprint:
        """What the ranks that are given this batch compare."""
        if self._open.stage_module.groups.same_batch is None:
            return BatchFingerprint()
        loop, epoch, index = position(self._trainer)
        return BatchFingerprint(fingerprint(batch), f"batch {index} of {loop} epoch {epoch}")

    def _weighted(self, microbatches: list[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with the weights that the user's rule gives them, if there is one."""
        if self._microbatch_weight is None or self._trainer.predicting:
            return microbatches
        return weigh_by(self._microbatch_weight, microbatches)

    def _sizes(self, microbatches: Sequence[MicroBatch]) -> list[float]:
        """What losses are weighted by: samples, or what the user says."""
        return [part.weight if self._weights_given else part.size for part in microbatches]

    def _combine(
        self,
        step: Batch,
        last: StageStep | None,
        microbatches: Sequence[MicroBatch],
        rules: StepRules,
        losses: Sequence[Term],
        compare: Callable[[], StepRules],
    ) -> Any:
        """Combine what the last stage's micro-batches returned and logged, for every stage."""
        run, stage_module = self._open, self._open.stage_module
        sends_all = self._sends_outputs or self._trainer.predicting
        is_new = self._is_new(step, last, rules, losses)
        result: tuple[Any, Any, Any, bool, list[Sent], list[str]] = None, None, None, False, [], []
        if last is not None:
            returned = last.outputs if sends_all else list(map(loss_alone, last.outputs))
            outputs = self._gathered(returned, microbatches, step.fingerprint)
            if outputs:
                output = merge(outputs, microbatches)
                logged = run.log.combine(run.metrics.batch_value, rules.logged)
                state = run.state.made_shared()
                result = logged, run.prints.combined(), output, is_new, *state
        logged, printed, output, is_new, sent, warnings = (
            stage_module.groups.broadcast_to_same_batch(result, stage_module.last_stage)
        )
        is_new |= self._is_late(rules, sent)
        if stage_module.groups.experts is not None:
            is_new = any(all_gather(is_new, stage_module.groups.experts))
        if is_new:
            logged = self._logged_again(logged, compare)
        for warning in (*warnings, *run.state.settle(sent)):
            if warning not in self._warned:
                self._warned.add(warning)
                rank_zero_warn(warning)
        run.log.replay(logged)
        run.prints.replay(printed)
        run.forget_batch()
        output = move_data_to_device(output, stage_module.device)
        if last is None or sends_all or not last.outputs or isinstance(output, Tensor):
            return output
        own = step.microbatches
        share = sum(part.weight for part in own) / sum(part.weight for part in microbatches)
        return with_loss(merge(last.outputs, own, share), output)

    def _logged_again(
        self, logged: list[LoggedValue], compare: Callable[[], StepRules]
    ) -> list[LoggedValue]:
        """Compare a batch that has logged in a new way, and combine its values as that shows."""
        stage_module = self._open.stage_module
        calls = self._open.log.calls()
        rules = compare()
        if calls:
            logged = [
                value.combined_by(calls[key], rules.logged.get(key))
                for key, value in zip(calls, logged, strict=True)
            ]
        return stage_module.groups.broadcast_to_same_batch(logged, stage_module.last_stage)

    def _gathered(
        self,
        outputs: list[Any],
        microbatches: Sequence[MicroBatch],
        fingerprint: BatchFingerprint,
    ) -> list[Any]:
        """The outputs of all replicas that share a batch, on the first; elsewhere none."""
        run, groups = self._open, self._open.stage_module.groups
        if groups.grid.replicas_per_batch == 1:
            return outputs
        outputs = move_data_to_device(outputs, "cpu")
        recorded = run.log.recorded(), run.metrics.recorded(), run.state.recorded()
        mine = fingerprint.fingerprint, outputs, *recorded
        everyone = gather(mine, groups.batch_replicas)
        if not everyone:
            return []
        fingerprints = {groups.grid.replica + n: theirs[0] for n, theirs in enumerate(everyone)}
        fingerprint.compare(fingerprints, "replica")
        run.metrics.join([states for *_, states, _ in everyone])
        run.state.join([parts for *_, parts in everyone], [part.weight for part in microbatches])
        for _, _, calls, *_ in everyone[1:]:
            run.log.add(calls)
        return [output for _, outputs, *_ in everyone for output in outputs]


def _agree_on_seed(stage_module: StageModule) -> None:
    """Give all ranks that are given the same batches one random state; collective among them."""
    groups, grid = stage_module.groups, stage_module.grid
    broadcast_seed(groups.same_batch, grid.same_batch_ranks[0])
