"""Compares what a step makes of a whole batch with what it makes of the batch's micro-batches.

Before the first batch of a loader is used, its step runs forward on the whole batch and on its
micro-batches, without a trace (``pipeline.dry_run``). So it is found out how values combine, and
what does not combine is said with both numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.batch_state import Changing
from lightning_axosparse.pipeline.combination import (
    Rule,
    Term,
    are_proportional,
    combine,
    found_rules,
)
from lightning_axosparse.pipeline.dry_run import DryRun, Rehearsal
from lightning_axosparse.pipeline.gradient_hooks import GradientHooks
from lightning_axosparse.pipeline.loss_weights import LossRule, LossWeights
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.stage_step import Batch
from lightning_axosparse.pipeline.state_check import StageChanges, StateCheck, agree
from lightning_axosparse.strategy.lightning.loggers import loggers_silenced
from lightning_axosparse.strategy.lightning.logging import (
    LogCall,
    LogKey,
    combined_calls,
    weight_of,
)
from lightning_axosparse.strategy.open_pipeline import OpenPipeline
from lightning_axosparse.support.troubleshooting import see


class StepRules(NamedTuple):
    """How the values of a step's micro-batches combine.

    Attributes:
        loss: how the losses do.
        logged: how the values under each logged name do.
        state: how what the step changes on the module does; the same on all ranks.
    """

    loss: Rule | None = None
    logged: Mapping[LogKey, Rule | None] = {}
    state: Sequence[Changing] = ()

    def besides(self, earlier: StepRules) -> StepRules:
        """These rules, and those of an earlier batch for what this one did not log or change."""
        places = {each.place for each in self.state}
        state = [each for each in earlier.state if each.place not in places]
        logged = {**earlier.logged, **self.logged}
        return self._replace(logged=logged, state=[*state, *self.state])


def signature_of(
    programs: Collection[int],
    losses: Sequence[Term],
    calls: Mapping[LogKey, Sequence[LogCall]],
    parts: Sequence[MicroBatch],
) -> Any:
    """What of a step may make a difference to how its values combine.

    Batches of one signature combine alike: the step has called the same functions, and taken means
    whose denominators are proportional to samples in both batches or in neither.

    Args:
        programs: which functions it has called for each micro-batch.
        losses: the loss of each micro-batch; none in evaluation.
        calls: what it has logged.
        parts: the micro-batches.
    """
    sizes = [float(part.size) for part in parts]
    seen: dict[Any, Any] = {"loss": are_proportional(losses, sizes), "step": set(programs)}
    for key, logged in calls.items():
        terms = [call.term for call in logged if call.term is not None]
        seen[key] = are_proportional(terms, sizes) if len(terms) == len(sizes) else len(terms)
    return seen


class Finding(NamedTuple):
    """What the comparison has found.

    Attributes:
        kind: "error" for a loss that differs, "warning" for another value, "info" for what could
            not be compared.
        text: in words.
        of_gradient: whether a loss is equal, and its gradient is not.
    """

    kind: Literal["error", "warning", "info"]
    text: str
    of_gradient: bool = False


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
                comparison = _Comparison(
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
    ) -> _Seen:
        """Run the step on copies of micro-batches, as it may change them."""
        run = self._run
        copies = [part._replace(batch=_copied(part.batch)) for part in parts]
        with run.metrics.batch(len(parts)):
            stages = run.pipeline.dry_run(replace(step, microbatches=copies), rehearsal)
        calls = run.log.calls()
        values = [logged.value for logged in run.log.combine(run.metrics.batch_value)]
        run.forget_batch()
        return _Seen(stages, calls, dict(zip(calls, values, strict=True)))

    def _incomparable(self, rehearsal: Rehearsal, whole: _Seen, cut: _Seen) -> str | None:
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
    dry_run: Callable[[Sequence[MicroBatch]], _Seen]
    parts: Sequence[MicroBatch]
    tolerance: float
    again: tuple[_Seen, _Seen] | None = None
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


class _Seen(NamedTuple):
    """What a dry run has shown on this rank.

    Attributes:
        stages: what each of its stages has seen.
        calls: what the step has logged, on the last stage.
        values: the batch's value of each call as it combines by itself.
    """

    stages: Mapping[int, DryRun]
    calls: Mapping[LogKey, Sequence[LogCall]]
    values: Mapping[LogKey, Any]


@dataclass
class _Comparison:
    """Compares the dry run of a whole batch with that of its micro-batches, on the last stage.

    Args:
        name: of the step.
        parts: the micro-batches.
        tolerance: largest relative difference.
        loss_rule: how the user wants losses to combine.
        stage: the last stage.
        used: how the batch was trained before; None if it was not.
    """

    name: str
    parts: Sequence[MicroBatch]
    tolerance: float
    loss_rule: LossRule
    stage: int
    used: StepRules | None
    findings: list[Finding] = field(default_factory=list)

    def compare(self, whole: _Seen, cut: _Seen) -> tuple[StepRules, list[Finding]]:
        """Return how values combine, and what does not combine."""
        self.findings = []
        loss, logged = self._compare_losses(whole, cut), {}
        for key, (call, *_) in whole.calls.items():
            calls = cut.calls.get(key, [])
            if call.term is None or call.origin is not None or not calls:
                self._compare_values(key[0], whole.values[key], cut.values.get(key))
            else:
                logged[key] = self._compare_logged(key[0], call, calls)
        return StepRules(loss, logged), self.findings

    def is_equal(self, whole: _Seen, cut: _Seen) -> bool:
        """Whether the losses make up the batch's, and so do their gradients."""
        best = self._best(whole.stages[self.stage], cut.stages[self.stage])
        return best is not None and best.is_equal

    def _best(self, whole: DryRun, cut: DryRun) -> _WeightedLoss | None:
        """What losses make up by the rule that fits best; None where there are none."""
        if not whole.losses or len(cut.losses) < len(self.parts):
            return None
        sizes = [float(part.size) for part in self.parts]
        rules: Iterable[Rule | None] = [None]
        if self.used is not None:
            rules = [self.used.loss]
        elif not self.loss_rule.is_given:
            rules = found_rules(whole.losses[0], cut.losses, sizes, self._is_batch)
        tried = []
        for rule in rules:
            tried.append(self._weighted(whole, cut, rule))
            if tried[-1].is_equal:
                return tried[-1]
        return next((each for each in tried if each.is_equal_loss), tried[0])

    def _compare_losses(self, whole: _Seen, cut: _Seen) -> Rule | None:
        """How the losses combine, by value and by gradient."""
        best = self._best(whole.stages[self.stage], cut.stages[self.stage])
        if best is None or best.is_equal:
            return None if best is None else best.rule
        theirs, ours = float(whole.stages[self.stage].losses[0].value), best.loss
        if best.is_equal_loss:
            what = (
                f"the same loss ({theirs:.6g}) with another gradient: its largest entry differs by "
                f"{best.gradient_difference:.1%}"
            )
        else:
            what = f"{theirs:.6g} on the whole first batch and {ours:.6g}"
        kind: Literal["error", "warning"] = "warning" if self.loss_rule.is_given else "error"
        self.findings.append(
            Finding(
                kind,
                f"The loss of {self.name} is {what} on its {len(self.parts)} micro-batches. It is "
                "not a mean or a sum over samples: it compares samples with each other, or takes a "
                "statistic or a count of the batch in a way that does not combine. "
                "AxoSparseStrategy(microbatches=1) is exact; microbatch_loss= and "
                "microbatch_weight= say how losses combine; check_first_batch=False compares "
                "nothing." + see("losses"),
                best.is_equal_loss,
            )
        )
        return best.rule

    def _weighted(self, whole: DryRun, cut: DryRun, rule: Rule | None) -> _WeightedLoss:
        given = self.loss_rule.weight is not None
        weights = LossWeights(
            self.parts,
            sum(part.size for part in self.parts),
            "given" if given else self.loss_rule.loss,
            rule=rule,
        )
        for term in cut.losses:
            weights.add(term)
        factor = weights.factor()
        final = [weights.weight(index) * factor for index in range(len(self.parts))]
        # A micro-batch that counts for nothing, such as padding, may have a loss of NaN.
        loss = sum(
            float(term.value) * weight
            for term, weight in zip(cut.losses, final, strict=True)
            if weight
        )
        difference = max(
            _gradient_difference(whole.gradients[0], cut.gradients, final),
            _gradient_difference(whole.slopes[0], cut.slopes, final),
        )
        is_equal_loss = self._is_batch(loss, whole.losses[0], cut.losses)
        # Gradients are differences of larger numbers.
        is_equal = is_equal_loss and difference <= 10 * self.tolerance
        return _WeightedLoss(rule, loss, difference, is_equal_loss, is_equal)

    def _compare_logged(self, name: str, whole: LogCall, calls: Sequence[LogCall]) -> Rule | None:
        """How the values under a name combine."""
        terms = [call.term for call in calls if call.term is not None]
        sizes = [weight_of(call) for call in calls]
        assert whole.term is not None
        if len(terms) == len(calls) == len(self.parts):
            for rule in found_rules(whole.term, terms, sizes, self._is_batch):
                if self._is_batch(combine(terms, sizes, rule), whole.term, terms):
                    return rule
        self._compare_values(name, whole.value, combined_calls(calls, None))
        return None

    def _compare_values(self, name: str, theirs: Any, ours: Any) -> None:
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            for key in theirs:
                self._compare_values(f"{name}[{key!r}]", theirs[key], ours.get(key))
        elif isinstance(theirs, Tensor) and not (
            isinstance(ours, Tensor) and _is_close(ours, theirs, self.tolerance, ())
        ):
            ours = "nothing" if ours is None else f"{float(ours):.6g}"
            self.findings.append(
                Finding(
                    "warning",
                    f"`self.log({name!r}, ...)` in {self.name} logs {float(theirs):.6g} for the "
                    f"whole first batch, and {ours} for its {len(self.parts)} micro-batches. Log "
                    "means and sums, and tensors that torch computes from them; or a torchmetrics "
                    "object, which gets all samples." + see("logging"),
                )
            )

    def _is_batch(self, value: Any, whole: Term, parts: Sequence[Term]) -> bool:
        return _is_close(value, whole.value, self.tolerance, [part.value for part in parts])


class _WeightedLoss(NamedTuple):
    """What micro-batches make up by one rule."""

    rule: Rule | None
    loss: float
    gradient_difference: float
    is_equal_loss: bool
    is_equal: bool


def _is_close(value: Any, expected: Any, tolerance: float, parts: Sequence[Any]) -> bool:
    """Whether a combined value is that of the batch, to rounding.

    Args:
        value: the combined value.
        expected: that of the whole batch.
        tolerance: relative to the largest of the numbers.
        parts: the values of micro-batches, which may cancel.
    """
    one, other = (torch.as_tensor(each).double().reshape(-1).cpu() for each in (value, expected))
    if one.shape != other.shape:
        return False
    if not bool(torch.isfinite(other).all()):
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    sizes = [torch.as_tensor(part).double().abs().nan_to_num().max() for part in (other, *parts)]
    return bool((one - other).abs().nan_to_num(torch.inf).max() <= tolerance * max(sizes))


def _gradient_difference(
    whole: Sequence[Tensor | None],
    parts: Sequence[Sequence[Tensor | None]],
    weights: Sequence[float],
) -> float:
    """The largest difference between gradients, relative to the largest entry."""
    finite = all(
        g is None or bool(torch.isfinite(g).all()) for each in (whole, *parts) for g in each
    )
    if not finite or any(len(each) != len(whole) for each in parts):
        return 0.0  # There is nothing to compare.
    differences, scales = [0.0], [0.0]
    for expected, *pieces in zip(whole, *parts, strict=True):
        terms = [g * w for g, w in zip(pieces, weights, strict=True) if g is not None and w]
        if expected is None:
            expected = torch.zeros(())
        joined = list(_joined(terms, expected))
        if not joined:
            continue
        differences.append(min(float((ours - expected).abs().max()) for ours in joined))
        scales += [float(each.abs().max()) for each in (expected, *terms)]
    return max(differences) / max(scales) if max(scales) else 0.0


def _joined(terms: Sequence[Tensor], whole: Tensor) -> Iterator[Tensor]:
    """The gradients of micro-batches as that of the batch, in each order that samples may have.

    Views of samples may follow one another: all first ones, and then all second ones.
    """
    if not terms:
        yield torch.zeros_like(whole)
    elif all(term.shape == whole.shape for term in terms):
        yield torch.stack(list(terms)).sum(0)
    else:
        for dim, size in enumerate(whole.shape):
            rest = whole.shape[:dim] + whole.shape[dim + 1 :]
            sizes = [term.shape[dim] for term in terms]
            alike = all(term.shape[:dim] + term.shape[dim + 1 :] == rest for term in terms)
            if alike and sum(sizes) == size:
                yield torch.cat(list(terms), dim)
                for views in (2, 3, 4):
                    if not any(each % views for each in sizes):
                        columns = zip(*(term.chunk(views, dim) for term in terms), strict=True)
                        yield torch.cat([part for column in columns for part in column], dim)


def _copied(batch: Any) -> Any:
    # A step may have asked for the gradient of what it was given.
    return apply_to_collection(
        batch, Tensor, lambda each: each.detach().clone().requires_grad_(each.requires_grad)
    )


def _not_compared(name: str, reason: str) -> Finding:
    return Finding(
        "info", f"{name} could not be checked on its first batch: {reason}." + see("losses")
    )
