"""Compares what a step makes of a whole batch with what it makes of the batch's micro-batches.

Before the first batch of a loader is used, its step runs forward on the whole batch and on its
micro-batches, without a trace (``pipeline.dry_run``). So it is found out how values combine, and
what does not combine is said with both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torchmetrics import Metric

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.backward.parameter_gradients import GradientHooks
from lightning_axosparse.pipeline.dry_run import Rehearsal, StageChanges, StateCheck, agree
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.stage_step import Batch
from lightning_axosparse.pipeline.state.batch_state import StateRules
from lightning_axosparse.strategy.compat.callbacks import loggers_silenced
from lightning_axosparse.strategy.compat.internals import outputs_are_read
from lightning_axosparse.strategy.compat.logging import LoggedValue
from lightning_axosparse.strategy.step.comparison import Comparison, Finding, RankDryRun, StepRules
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.support.messages import rank_zero_info, rank_zero_warn
from lightning_axosparse.support.troubleshooting import see


@contextmanager
def without_trace(run: OpenPipeline) -> Iterator[set[str]]:
    """Let steps inside the context change no metrics, write to no logger and call no hooks.

    Yields:
        Filled with the attributes of loggers that the steps have written with.
    """
    module, held = run.stage_module.module, run.stage_module.sharding.held()
    hooks = GradientHooks(held.values())
    silenced = loggers_silenced(module.trainer)
    with run.metrics.kept(), silenced as written, hooks.set_aside():
        yield written


class StepCheck:
    """Compares a step on a whole batch with the same step on the batch's micro-batches.

    What the user has been ``told`` is not said again.
    """

    def __init__(
        self,
        run: OpenPipeline,
        step: Batch,
        batch: Any,
        trains: bool,
        tolerance: float,
        told: set[str],
    ) -> None:
        stage_module = run.stage_module
        samples = sum(part.size for part in step.microbatches)
        self._run, self._stage_module, self._step = run, stage_module, step
        self._tolerance, self._told = tolerance, told
        self._parts = [part._replace(number=0) for part in step.microbatches]
        self._whole_batch = [MicroBatch(batch, samples, 1.0)]
        self._rehearsal = Rehearsal(
            stage_module.module,
            stage_module.own_loss_parameters(),
            samples,
            trains,
            stage_module.device,
        )
        # Ranks that compute one another's tokens take part in each other's dry runs.
        self._gather = partial(all_gather, group=stage_module.groups.whole)
        self._again: tuple[RankDryRun, RankDryRun] | None = None
        """The runs of the batch and its micro-batches that begin with what the batch has left."""

    def rules(
        self, free: Callable[[], int], weights_given: bool, used: StepRules | None
    ) -> StepRules:
        """Compare, and tell the user what differs; collective over the pipeline.

        A batch that was trained before it is compared has to have combined as it was ``used``.

        Returns:
            How the values of micro-batches combine, on the last stage; elsewhere anything.

        Raises:
            MisconfigurationException: on every rank, if the losses of micro-batches do not make up
                the loss of the batch.
        """
        name, parts = self._step.step.__name__, self._parts
        comparison = Comparison(
            name,
            parts,
            self._tolerance,
            weights_given,
            self._stage_module.last_stage,
            used,
            outputs_are_read(self._stage_module.module.trainer, name),
        )
        with without_trace(self._run) as written:
            if self._fits(free):
                rules, findings, reason = self._found(comparison)
            else:
                rules, findings = StepRules(), []
                reason = (
                    f"{self._rehearsal.samples} samples at once would not fit into memory, as "
                    f"{parts[0].size} take what was measured"
                )
        findings += self._unread(written)
        everyone = self._gather((findings, reason, rules.needs_batch))
        reason = next((theirs for _, theirs, _ in everyone if theirs is not None), None)
        needs_batch = any(theirs for *_, theirs in everyone)
        if reason is None:
            self._tell([each for theirs, *_ in everyone for each in theirs])
        else:
            text = f"{name} could not be checked on its first batch: {reason}." + see("losses")
            self._tell([Finding("info", text)])
        if needs_batch:
            text = (
                f"The loss of {name} is a function of several means of the batch, as one that "
                "balances experts is: backward passes begin when all forward passes have run, and "
                f"each stage holds all {len(parts)} micro-batches. recompute=1 keeps little of "
                "them."
            )
            self._tell([Finding("info", text + see("losses"))])
        return rules._replace(needs_batch=needs_batch)

    def _found(self, comparison: Comparison) -> tuple[StepRules, list[Finding], str | None]:
        """Run the step on the batch and its micro-batches; collective over the pipeline.

        Returns:
            How values combine, on the last stage, with what the step changes on the module, the
            same on all ranks; what to tell the user, on the last stage; and why the runs could not
            be compared, None if they were.
        """
        whole, cut = self._both(comparison)
        reason = self._incomparable(whole, cut)
        is_compared = reason is None and self._stage_module.runs_last_stage
        rules, findings = StepRules(), list[Finding]()
        if is_compared:
            rules, findings = comparison.compare(whole, cut)
            if findings and any(each.is_unclear for each in self._rehearsal.numbers.values()):
                reason = "it is not clear to which samples its random numbers belong"
        findings = self._beyond_rounding(findings, comparison)
        state, advice, failure = self._changing(self._whole_batch, whole, cut)
        if is_compared:
            if failure is not None:
                text = f"What {comparison.name} changes on the module could not be compared: "
                findings.append(Finding("info", f"{text}{failure}." + see("steps")))
            findings += [Finding("warning", text) for text in advice]
            if self._again is not None and not findings:
                # By the rules that were found: they may have held by chance.
                findings = replace(comparison, used=rules).compare(*self._again)[1]
        return rules._replace(state=state), findings, reason

    def _beyond_rounding(self, findings: list[Finding], comparison: Comparison) -> list[Finding]:
        """The findings without gradients that differ by rounding; collective over the pipeline.

        Rounding decides which of equal values has the gradient of a maximum.
        """
        if not any(self._gather(any(each.of_gradient for each in findings))):
            return findings
        with self._rehearsal.shifted():
            others = self._both(comparison)
        is_rounding = bool(findings) and comparison.is_equal(*others)
        return [each for each in findings if not (is_rounding and each.of_gradient)]

    def changes(self) -> StepRules:
        """Find what the step changes on the module, where a batch is not divided."""
        self._rehearsal.differentiates = False
        with without_trace(self._run) as written:
            seen = self._dry_run(self._parts)
            state, advice, _ = self._changing(self._parts, seen, seen)
        findings = [Finding("warning", text) for text in advice] + self._unread(written)
        self._tell([each for of_rank in self._gather(findings) for each in of_rank])
        return StepRules(state=state)

    def _unread(self, written: set[str]) -> list[Finding]:
        """What to say of a step that writes to loggers itself."""
        return [
            Finding(
                "warning",
                f"{self._step.step.__name__} calls `self.logger.{name}`, which on one process it "
                f"does once for a batch, and here for each of its {len(self._parts)} micro-batches "
                "with the micro-batch's value; and behind the layers on the rank of the last stage "
                "alone, where loggers write nothing. Use `self.log`, or write in a hook such as "
                "`on_train_batch_end`, from what the step returns." + see("logging"),
            )
            for name in sorted(written)
        ]

    def _fits(self, free: Callable[[], int]) -> bool:
        """Whether the whole batch fits into memory, as far as its first micro-batch shows."""
        rehearsal = self._rehearsal
        rehearsal.measures = True
        first = self._dry_run(self._parts[:1])
        rehearsal.measures = False
        rehearsal.numbers.clear()
        taken = sum(max(stage.peaks, default=0) for stage in first.stages.values())
        fits = taken * rehearsal.samples / self._parts[0].size <= free()
        groups = self._stage_module.groups
        # Replicas that share a batch compare it, or do not, together.
        together = groups.whole if groups.experts is not None else groups.same_batch
        return all(all_gather(fits, together))

    def _both(self, comparison: Comparison) -> tuple[RankDryRun, RankDryRun]:
        """Run the step on the whole batch and on its micro-batches; collective over the pipeline.

        Where gradients need the batch, micro-batches run once more, with its numbers.
        """
        whole, cut = self._dry_run(self._whole_batch), self._dry_run(self._parts)
        slopes = None
        if self._stage_module.runs_last_stage and _failure(whole, cut) is None:
            slopes = comparison.slopes(whole, cut)
        if any(self._gather(slopes is not None)):
            self._rehearsal.slopes = slopes
            cut = cut._replace(by_batch=self._dry_run(self._parts).stages)
            self._rehearsal.slopes = None
        return whole, cut

    def _dry_run(self, parts: Sequence[MicroBatch]) -> RankDryRun:
        """Run the step without a trace; metrics begin empty."""
        run = self._run
        with run.metrics.kept():
            run.metrics.reset()
            with run.metrics.batch(len(parts)):
                step = replace(self._step, microbatches=parts, is_shared=True)
                stages = run.pipeline.dry_run(step, self._rehearsal)
            calls = run.log.calls()
            values = run.log.combine(run.metrics.batch_value)
            seen = {key: self._value(each) for key, each in zip(calls, values, strict=True)}
        run.forget_batch()
        return RankDryRun(stages, calls, seen)

    def _value(self, logged: LoggedValue) -> Any:
        """The batch's value; of a metric that was only updated what it would be afterwards."""
        if logged.value is not None or logged.metric is None:
            return logged.value
        metric = self._stage_module.module.get_submodule(logged.metric)
        return self._run.metrics.updated_value(cast(Metric, metric))

    def _incomparable(self, whole: RankDryRun, cut: RankDryRun) -> str | None:
        """Why the two runs cannot be compared, as far as this rank knows."""
        for stage, of_batch in whole.stages.items():
            of_parts, numbers = cut.stages[stage], self._rehearsal.numbers[stage]
            failure = of_batch.failure or of_parts.failure
            if failure:
                where = "on the whole batch" if of_batch.failure else "on micro-batches"
                return f"{where} it raised {failure}"
            if numbers.problem is not None:
                return numbers.problem
            if any(drawn != of_batch.drawn[0] for drawn in of_parts.drawn):
                return "it draws as many numbers from `random` or NumPy as there are samples"
        return None

    def _changing(
        self, batch: Sequence[MicroBatch], whole: RankDryRun, cut: RankDryRun
    ) -> tuple[StateRules, list[str], str | None]:
        """What the step changes, and by which rules; collective over the pipeline.

        Returns:
            What it changes, what to warn of, and why that could not be found out; the same on all
            stages.
        """
        stage_module, rehearsal, gather = self._stage_module, self._rehearsal, self._gather
        stage_of = stage_module.sharding.stage_of
        if any(gather(_failure(whole, cut))):
            return StateRules(), [], None  # It has been said.
        first, again = _state_changes(whole, cut), dict[int, StageChanges]()
        changes = any(each.places for each in first.values())
        if len(self._parts) > 1 and any(gather(changes)):
            rehearsal.begins = {
                stage: {
                    place: value
                    for place, value in each.whole.items()
                    if place.is_of_hooks or stage_of(place.dotted) in (None, stage)
                }
                for stage, each in first.items()
            }
            # What the step has kept of the same samples is at no distance of them, where gradients
            # of distances follow rounding.
            rehearsal.differentiates = False
            runs = self._dry_run(batch), self._dry_run(self._parts)
            rehearsal.begins = {}
            of_batch, of_parts = (next(filter(None, gather(_failure(run))), None) for run in runs)
            if of_parts and not of_batch:
                raise MisconfigurationException(_torn(self._step.step.__name__, first, of_parts))
            if of_batch:
                return StateRules(), [], f"on the state that it leaves it raised {of_batch}"
            self._again, again = runs, _state_changes(*runs)
        trainer, total = stage_module.module.trainer, sum(part.weight for part in self._parts)
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        check = StateCheck(
            stage_module.module,
            {id(parameter) for group in groups for parameter in group["params"]},
            stage_of,
            [part.weight / total for part in self._parts],
            self._tolerance,
        )
        found = [each for of_rank in gather(check.found(first, again)) for each in of_rank]
        return *agree(found, stage_module.last_stage, stage_module.is_whole), None

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.kind == "error":
                raise MisconfigurationException(finding.text)
            about = finding.about or finding.text
            if about in self._told:
                continue
            self._told.add(about)
            (rank_zero_warn if finding.kind == "warning" else rank_zero_info)(finding.text)


def _failure(*runs: RankDryRun) -> str | None:
    """The first error that the stages of this rank have met."""
    failures = (stage.failure for run in runs for stage in run.stages.values())
    return next(filter(None, failures), None)


def _torn(name: str, changes: Mapping[int, StageChanges], failure: str) -> str:
    """What to say of state that whole batches can go on with, and micro-batches cannot."""
    places = {str(place) for each in changes.values() for place in each.places}
    return (
        f"On what {name} leaves on the module ({', '.join(sorted(places)) or 'elsewhere'}) a whole "
        f"batch runs, and a micro-batch raises {failure}. If it has an entry for each sample, as "
        "the state of a recurrent network has, it cannot be handed on from batch to batch in "
        "micro-batches: use AxoSparseStrategy(microbatches=1)." + see("steps")
    )


def _state_changes(whole: RankDryRun, cut: RankDryRun) -> dict[int, StageChanges]:
    return {
        stage: StageChanges(of_batch.changes[0], cut.stages[stage].changes, of_batch.written[0])
        for stage, of_batch in whole.stages.items()
    }
