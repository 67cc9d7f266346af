"""Compares what a step makes of a whole batch with what it makes of the batch's micro-batches.

Before the first batch of a loader is used, its step runs forward on the whole batch and on its
micro-batches, without a trace (``pipeline.dry_run``). So it is found out how values combine, and
what does not combine is said with both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.backward.gradient_hooks import GradientHooks
from lightning_axosparse.pipeline.batch.microbatch import MicroBatch
from lightning_axosparse.pipeline.dry_run import DryRun, Rehearsal
from lightning_axosparse.pipeline.loss.weights import LossRule
from lightning_axosparse.pipeline.stage_step import Batch
from lightning_axosparse.pipeline.state.batch_state import Changing
from lightning_axosparse.pipeline.state.check import StageChanges, StateCheck, agree
from lightning_axosparse.strategy.compat.logging.loggers import loggers_silenced
from lightning_axosparse.strategy.step.comparison import Comparison, Finding, Seen, StepRules
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.support.troubleshooting import see


@contextmanager
def without_trace(run: OpenPipeline) -> Iterator[None]:
    """Let steps inside the context change no metrics, write to no logger and call no hooks."""
    module, held = run.stage_module.module, run.stage_module.sharding.held()
    hooks = GradientHooks(held.values())
    with run.metrics.kept(), loggers_silenced(module.trainer), hooks.set_aside():
        yield


class StepCheck:
    """Compares a step on a whole batch with the same step on the batch's micro-batches.

    Args:
        run: the pipeline.
        free: returns the bytes that this rank may still take.
        tolerance: largest relative difference.
        loss_rule: how the user wants losses to combine.
        told: what the user has been told, which is not said again.
    """

    def __init__(
        self,
        run: OpenPipeline,
        free: Callable[[], int],
        tolerance: float,
        loss_rule: LossRule,
        told: set[str],
    ) -> None:
        self._run, self._free, self._told = run, free, told
        self._tolerance, self._loss_rule = tolerance, loss_rule

    def rules(
        self,
        step: Batch,
        batch: Any,
        microbatches: Sequence[MicroBatch],
        trains: bool,
        used: StepRules | None = None,
    ) -> StepRules:
        """Compare, and tell the user what differs; collective over the pipeline.

        Args:
            step: the step, with what it is given besides the batch.
            batch: the whole batch.
            microbatches: its micro-batches.
            trains: whether the step returns a loss.
            used: how the batch was trained, if it was before it is compared; its loss has to have
                combined so.

        Returns:
            How the values of micro-batches combine, on the last stage; elsewhere anything.

        Raises:
            MisconfigurationException: on every rank, if the losses of micro-batches do not make up
                the loss of the batch.
        """
        run, stage_module, name = self._run, self._run.stage_module, step.step.__name__
        samples = sum(part.size for part in microbatches)
        rehearsal = Rehearsal(stage_module.module, samples, trains, stage_module.device)
        whole_batch = [MicroBatch(batch, samples, 1.0)]
        parts = [part._replace(number=0) for part in microbatches]
        rules, findings, changing = StepRules(), list[Finding](), list[Changing]()
        inter = stage_module.groups.inter
        with without_trace(run):
            if self._fits(rehearsal, step, parts):
                whole = self._dry_run(rehearsal, step, whole_batch)
                cut = self._dry_run(rehearsal, step, parts)
                reason = self._incomparable(rehearsal, whole, cut)
                comparison = Comparison(
                    name, parts, self._tolerance, self._loss_rule, stage_module.last_stage, used
                )
                if reason is None and stage_module.runs_last_stage:
                    rules, findings = comparison.compare(whole, cut)
                    if findings and any(each.is_unclear for each in rehearsal.numbers.values()):
                        reason = "it is not clear to which samples its random numbers belong"
                dry_run = partial(self._dry_run, rehearsal, step)
                if any(all_gather(any(each.of_gradient for each in findings), inter)):
                    # Rounding decides which of equal values has the gradient of a maximum.
                    with rehearsal.shifted():
                        others = dry_run(whole_batch), dry_run(parts)
                    if findings and comparison.is_equal(*others):
                        findings = [each for each in findings if not each.of_gradient]
                state = _StateRuns(run, rehearsal, dry_run, parts, self._tolerance)
                changing, advice = state.changing(whole_batch, whole.stages, cut.stages)
                reason = reason or state.failure
                if reason is None and stage_module.runs_last_stage:
                    findings += [Finding("warning", text) for text in advice]
                    if state.again is not None and not findings:
                        # By the rules that were found: they may have held by chance.
                        findings = replace(comparison, used=rules).compare(*state.again)[1]
            else:
                reason = (
                    f"{samples} samples at once would not fit into memory, as {parts[0].size} take "
                    "what was measured"
                )
        reason, findings = self._agreed(reason, findings)
        if reason is not None:
            findings = [_not_compared(name, reason)]
        self._tell(findings)
        return rules._replace(state=changing)

    def changes(self, step: Batch, trains: bool) -> StepRules:
        """Find what the step changes on the module, where a batch is not divided.

        Args:
            step: the step, with what it is given besides the batch.
            trains: whether the step returns a loss.
        """
        run, stage_module = self._run, self._run.stage_module
        (part,) = step.microbatches
        rehearsal = Rehearsal(stage_module.module, part.size, trains, stage_module.device)
        rehearsal.differentiates = False
        with without_trace(run):
            dry_run = partial(self._dry_run, rehearsal, step)
            seen = dry_run([part]).stages
            state = _StateRuns(run, rehearsal, dry_run, [part], self._tolerance)
            changing, advice = state.changing([part], seen, seen)
        self._tell([Finding("warning", text) for text in advice])
        return StepRules(state=changing)

    def _fits(
        self,
        rehearsal: Rehearsal,
        step: Batch,
        parts: Sequence[MicroBatch],
    ) -> bool:
        """Whether the whole batch fits into memory, as far as its first micro-batch shows."""
        rehearsal.measures = True
        first = self._dry_run(rehearsal, step, parts[:1])
        rehearsal.measures = False
        rehearsal.numbers.clear()
        taken = sum(max(stage.peaks, default=0) for stage in first.stages.values())
        fits = taken * rehearsal.samples / parts[0].size <= self._free()
        return all(all_gather(fits, self._run.stage_module.groups.inter))

    def _dry_run(
        self,
        rehearsal: Rehearsal,
        step: Batch,
        parts: Sequence[MicroBatch],
    ) -> Seen:
        """Run the step on copies of micro-batches, as it may change them."""
        run = self._run
        copies = [part._replace(batch=_copied(part.batch)) for part in parts]
        with run.metrics.batch(len(parts)):
            stages = run.pipeline.dry_run(replace(step, microbatches=copies), rehearsal)
        calls = run.log.calls()
        values = [logged.value for logged in run.log.combine(run.metrics.batch_value)]
        run.forget_batch()
        return Seen(stages, calls, dict(zip(calls, values, strict=True)))

    def _incomparable(self, rehearsal: Rehearsal, whole: Seen, cut: Seen) -> str | None:
        """Why the two runs cannot be compared, as far as this rank knows."""
        for stage, of_batch in whole.stages.items():
            of_parts, numbers = cut.stages[stage], rehearsal.numbers[stage]
            failures = of_batch.failure, of_parts.failure
            if any(failures):
                where = "on the whole batch" if of_batch.failure else "on micro-batches"
                return f"{where} it raised {next(filter(None, failures))}"
            if numbers.problem is not None:
                return numbers.problem
            if any(drawn != of_batch.drawn[0] for drawn in of_parts.drawn):
                return "it draws as many numbers from `random` or NumPy as there are samples"
        return None

    def _agreed(
        self, reason: str | None, findings: Sequence[Finding]
    ) -> tuple[str | None, list[Finding]]:
        """What all stages have found."""
        everyone = all_gather((reason, list(findings)), self._run.stage_module.groups.inter)
        reasons = [theirs for theirs, _ in everyone if theirs is not None]
        return next(iter(reasons), None), [each for _, theirs in everyone for each in theirs]

    def _tell(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            if finding.kind == "error":
                raise MisconfigurationException(finding.text)
            if finding.text in self._told:
                continue
            self._told.add(finding.text)
            (rank_zero_warn if finding.kind == "warning" else rank_zero_info)(finding.text)


@dataclass
class _StateRuns:
    """The dry runs that show what a step changes on the module.

    Args:
        run: the pipeline.
        rehearsal: what the runs have in common.
        dry_run: runs the step on micro-batches.
        parts: the micro-batches.
        tolerance: largest relative difference.

    Attributes:
        again: the runs of the batch and its micro-batches that begin with what the batch has left.
        failure: why there were none; None if there were, or need not be.
    """

    run: OpenPipeline
    rehearsal: Rehearsal
    dry_run: Callable[[Sequence[MicroBatch]], Seen]
    parts: Sequence[MicroBatch]
    tolerance: float
    again: tuple[Seen, Seen] | None = None
    failure: str | None = None

    def changing(
        self,
        batch: Sequence[MicroBatch],
        whole: Mapping[int, DryRun],
        cut: Mapping[int, DryRun],
    ) -> tuple[list[Changing], list[str]]:
        """What the step changes, and by which rules; collective over the pipeline.

        Args:
            batch: the whole batch as one.
            whole: what its dry run has shown on the stages of this rank.
            cut: what that of the micro-batches has shown.

        Returns:
            What it changes, and what to warn of, the same on all stages.
        """
        stage_module, rehearsal = self.run.stage_module, self.rehearsal
        gather = partial(all_gather, group=stage_module.groups.inter)
        total = sum(part.weight for part in self.parts)
        check = StateCheck(
            stage_module.module,
            rehearsal.state,
            _optimized(stage_module.module.trainer),
            stage_module.sharding.stage_of,
            [part.weight / total for part in self.parts],
            self.tolerance,
        )
        if any(gather(_failure(whole, cut))):
            return [], []  # It has been said.
        first = _state_changes(whole, cut)
        found = check.found(first, {})
        if len(self.parts) > 1 and any(gather(bool(found))):
            stage_of = stage_module.sharding.stage_of
            rehearsal.begins = {
                stage: {
                    place: value
                    for place, value in changes.whole.items()
                    if stage_of(place.dotted) in (None, stage)
                }
                for stage, changes in first.items()
            }
            # What the step has kept of the same samples is at no distance of them, where gradients
            # of distances follow rounding.
            rehearsal.differentiates = False
            self.again = self.dry_run(batch), self.dry_run(self.parts)
            rehearsal.begins = {}
            runs = [each.stages for each in self.again]
            failed = [each for each in gather(_failure(*runs)) if each is not None]
            if failed:
                self.again, self.failure = (
                    None,
                    f"on the state that it leaves it raised {failed[0]}",
                )
                return [], []
            found = check.found(first, _state_changes(*runs))
        everywhere = [each for of_rank in gather(found) for each in of_rank]
        return agree(everywhere, stage_module.last_stage, stage_module.is_whole)


def _optimized(trainer: pl.Trainer) -> set[int]:
    """The ids of the parameters that the optimizers of a fit change."""
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {id(parameter) for group in groups for parameter in group["params"]}


def _failure(*runs: Mapping[int, DryRun]) -> str | None:
    """The first error that the stages of this rank have met."""
    failures = (stage.failure for run in runs for stage in run.values())
    return next(filter(None, failures), None)


def _state_changes(
    whole: Mapping[int, DryRun], cut: Mapping[int, DryRun]
) -> dict[int, StageChanges]:
    return {
        stage: StageChanges(of_batch.changes[0], cut[stage].changes, of_batch.written[0])
        for stage, of_batch in whole.items()
    }


def _copied(batch: Any) -> Any:
    # A step may have asked for the gradient of what it was given.
    return apply_to_collection(
        batch, Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad)
    )


def _not_compared(name: str, reason: str) -> Finding:
    return Finding(
        "info", f"{name} could not be checked on its first batch: {reason}." + see("losses")
    )
