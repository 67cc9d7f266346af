"""Compares what a step has shown of a whole batch with what it has of the batch's micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import children, is_array
from lightning_axosparse.pipeline.dry_run import DryRun
from lightning_axosparse.pipeline.loss.combination import (
    Rule,
    combine,
    found_rules,
    own_rule,
    shares,
    slopes,
)
from lightning_axosparse.pipeline.loss.outputs import merge, plain
from lightning_axosparse.pipeline.loss.terms import Leaf, Term, leaves
from lightning_axosparse.pipeline.loss.weights import LossWeights
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.state.batch_state import StateRules
from lightning_axosparse.pipeline.state.values import same
from lightning_axosparse.strategy.compat.logging import LogCall, LogKey, combined_calls
from lightning_axosparse.support.troubleshooting import see

_MOST_COMPARISONS = 8
"""Batches of a loader that are compared, where a step computes its values in ever new ways."""

_ENOUGH_TO_FIT = 4
"""Batches whose numbers a rule has to fit of which nothing else is known."""

_LOSS = "loss", 0
"""Stands among the names that are logged."""


class StepRules(NamedTuple):
    """How the values of a step's micro-batches combine.

    Attributes:
        loss: how the losses do.
        needs_batch: whether the gradients of micro-batches depend on numbers of the whole batch, as
            for :class:`LossWeights`; the same on all ranks.
        logged: how the values under each logged name do.
        state: how what the step changes on the module does; the same on all ranks.
        fitted: the names whose rules follow from the numbers of a batch alone.
    """

    loss: Rule | None = None
    needs_batch: bool = False
    logged: Mapping[LogKey, Rule | None] = {}
    state: StateRules = StateRules()
    fitted: Collection[LogKey] = ()

    def besides(self, earlier: StepRules) -> StepRules:
        """These rules, and those of an earlier batch for what this one did not log or change."""
        logged = {**earlier.logged, **self.logged}
        known = earlier if self.loss is None else self
        return self._replace(
            loss=known.loss,
            needs_batch=known.needs_batch,
            logged=logged,
            state=self.state.besides(earlier.state),
            fitted={*earlier.fitted, *self.fitted},
        )


@dataclass
class Compared:
    """What those batches of a loader have shown of which the step was compared.

    Attributes:
        rules: how the values of micro-batches combine; None before the first batch.
    """

    rules: StepRules | None = None
    _batches: int = 0
    _signatures: list[Any] = field(default_factory=list)
    _varied: set[tuple[Any, int]] = field(default_factory=set)

    def is_enough(
        self,
        rules: StepRules,
        programs: Collection[int],
        losses: Sequence[Term],
        calls: Mapping[LogKey, Sequence[LogCall]],
        parts: Sequence[MicroBatch],
    ) -> bool:
        """Whether it shows how the values of another batch combine; if not, compare this one.

        Batches combine alike if the step has called the same functions (``programs``), and taken
        means whose denominators are proportional to samples in both or in neither. A number that
        was the same in all micro-batches, such as a score of zero, has shown nothing. Nor does a
        rule that fits the numbers of one batch have to fit those of others.
        """
        if self._batches == _MOST_COMPARISONS:
            return True
        terms = {key: [call.term for call in logged if call.term] for key, logged in calls.items()}
        terms[_LOSS] = list(losses)
        sizes = [float(part.size) for part in parts]
        signature: dict[LogKey | None, Any] = {None: set(programs)}
        varied = set()
        for key, each in terms.items():
            numbers = list(zip(*map(leaves, each), strict=False))  # those in one place together
            signature[key] = len(each)
            if len(each) == len(sizes):
                means = (column for column in numbers if column[0].kind == "mean")
                signature[key] = [_is_by_samples(column, sizes) for column in means]
            places = [(key, place) for place in range(len(numbers))]
            unseen = [each for each in places if each not in self._varied]
            varied |= {each for each in unseen if _vary(numbers[each[1]])}
        is_known = signature in self._signatures and not varied
        if is_known and not (rules.fitted and self._batches < _ENOUGH_TO_FIT):
            return True
        self._signatures.append(signature)
        self._varied |= varied
        self._batches += 1
        return self._batches == 1  # It was compared before it was used.


def _is_by_samples(means: Sequence[Leaf], sizes: Sequence[float]) -> bool:
    """Whether the denominators of means are proportional to samples."""
    return len({leaf.count / size for leaf, size in zip(means, sizes, strict=True)}) == 1


def _vary(numbers: Sequence[Leaf]) -> bool:
    """Whether numbers of samples are not the same in all micro-batches."""
    first, *others = numbers
    return first.kind != "same" and not all(same(first.value, each.value) for each in others)


class Finding(NamedTuple):
    """What the comparison has found.

    Attributes:
        kind: "error" for a loss that differs, "warning" for another value, "info" for what could
            not be compared.
        text: in words.
        of_gradient: whether a loss is equal, and its gradient is not.
        about: the value that it is about, which is named once; by default the text.
    """

    kind: Literal["error", "warning", "info"]
    text: str
    of_gradient: bool = False
    about: str = ""


class RankDryRun(NamedTuple):
    """What a dry run has shown on this rank.

    Attributes:
        stages: what each of its stages has seen.
        calls: what the step has logged, on the last stage.
        values: the batch's value of each call as it combines by itself.
        by_batch: the stages again, where the gradients were made with numbers of the whole batch;
            none where the loss is not such a function.
    """

    stages: Mapping[int, DryRun]
    calls: Mapping[LogKey, Sequence[LogCall]]
    values: Mapping[LogKey, Any]
    by_batch: Mapping[int, DryRun] = {}


@dataclass
class Comparison:
    """Compares the dry run of a whole batch with that of its micro-batches, on the last stage.

    Attributes:
        tolerance: largest relative difference.
        weights_given: whether the user has given the weights of micro-batches.
        used: how the batch was trained before; None if it was not.
        outputs_are_read: whether anybody gets what the step returns besides the loss.
    """

    name: str
    parts: Sequence[MicroBatch]
    tolerance: float
    weights_given: bool
    stage: int
    used: StepRules | None
    outputs_are_read: bool = False
    findings: list[Finding] = field(default_factory=list)

    def compare(self, whole: RankDryRun, cut: RankDryRun) -> tuple[StepRules, list[Finding]]:
        """Return how values combine, and what does not combine."""
        self.findings = []
        (loss, needs_batch), logged, fitted = self._compare_losses(whole, cut), {}, set()
        for key, (call, *_) in whole.calls.items():
            calls = cut.calls.get(key, [])
            if call.term is None or call.origin is not None or not calls:
                self._compare_values(key[0], whole.values[key], cut.values.get(key))
            else:
                logged[key], is_fitted = self._compare_logged(key, call, calls)
                fitted |= {key} if is_fitted else set()
        if self.outputs_are_read:
            self._compare_outputs(whole.stages[self.stage], cut.stages[self.stage])
        return StepRules(loss, needs_batch, logged, fitted=fitted), self.findings

    def is_equal(self, whole: RankDryRun, cut: RankDryRun) -> bool:
        """Whether the losses make up the batch's, and so do their gradients."""
        best = self._best(whole, cut)
        return best is not None and best.is_equal

    def slopes(self, whole: RankDryRun, cut: RankDryRun) -> list[list[Tensor]] | None:
        """By how much the batch's loss changes with the numbers of each micro-batch.

        None if weights of the losses say the same.
        """
        rule = self._rule_of_numbers(whole.stages[self.stage], cut.stages[self.stage])
        return None if rule is None else slopes(cut.stages[self.stage].losses, self._sizes, rule)

    @property
    def _sizes(self) -> list[float]:
        return [part.weight if self.weights_given else part.size for part in self.parts]

    def _rule_of_numbers(self, whole: DryRun, cut: DryRun) -> Rule | None:
        """The rule of a loss whose gradients depend on numbers of the batch; None of others."""
        if self.weights_given or not whole.losses or len(cut.losses) < len(self.parts):
            return None
        if self.used is not None:
            return self.used.loss if self.used.needs_batch else None
        for rule in found_rules(whole.losses[0], cut.losses, self._sizes, self._is_batch):
            value = combine(cut.losses, self._sizes, rule)
            if self._is_batch(value, whole.losses[0], cut.losses):
                weighs = isinstance(rule, str) or shares(cut.losses, self._sizes, rule)
                return None if weighs else rule
        return None

    def _best(self, whole_batch: RankDryRun, parts: RankDryRun) -> _WeightedLoss | None:
        """What losses make up by the rule that fits best; None where there are none."""
        whole, cut = whole_batch.stages[self.stage], parts.stages[self.stage]
        if not whole.losses or len(cut.losses) < len(self.parts):
            return None
        rules: Iterable[Rule | None] = ["samples"]
        if not self.weights_given:
            rules = found_rules(whole.losses[0], cut.losses, self._sizes, self._is_batch)
            rules = rules if self.used is None else [self.used.loss]
        tried = []
        if (rule := self._rule_of_numbers(whole, cut)) is not None:
            by_batch, rules = parts.by_batch.get(self.stage, cut), [] if self.used else rules
            tried.append(self._weighted(whole, by_batch, rule, needs_batch=True))
        for rule in rules:
            if tried and tried[-1].is_equal:
                break
            tried.append(self._weighted(whole, cut, rule))
        if tried[-1].is_equal:
            return tried[-1]
        return next((each for each in tried if each.is_equal_loss), tried[0])

    def _compare_losses(self, whole: RankDryRun, cut: RankDryRun) -> tuple[Rule | None, bool]:
        """How the losses combine, by value and by gradient, and if gradients need the batch."""
        best = self._best(whole, cut)
        if best is None:
            return None, False
        if best.is_equal:
            return best.rule, best.needs_batch
        theirs, ours = float(whole.stages[self.stage].losses[0].value), best.loss
        if best.is_equal_loss:
            what = (
                f"the same loss ({theirs:.6g}) with another gradient: its largest entry differs by "
                f"{best.gradient_difference:.1%}"
            )
        else:
            what = f"{theirs:.6g} on the whole first batch and {ours:.6g}"
        kind: Literal["error", "warning"] = "warning" if self.weights_given else "error"
        self.findings.append(
            Finding(
                kind,
                f"The loss of {self.name} is {what} on its {len(self.parts)} micro-batches. It is "
                "not a mean or a sum over samples: it compares samples with each other, or takes a "
                "statistic or a count of the batch in a way that does not combine. "
                "AxoSparseStrategy(microbatches=1) is exact; microbatch_weight= says how "
                "losses combine; check_first_batch=False compares "
                "nothing." + see("losses"),
                best.is_equal_loss,
            )
        )
        return best.rule, best.needs_batch

    def _weighted(
        self, whole: DryRun, cut: DryRun, rule: Rule | None, needs_batch: bool = False
    ) -> _WeightedLoss:
        weights = LossWeights(self._sizes, sum(self._sizes), rule=rule)
        if needs_batch:
            final, loss = [1.0] * len(self.parts), float(combine(cut.losses, self._sizes, rule))
        else:
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
        return _WeightedLoss(rule, needs_batch, loss, difference, is_equal_loss, is_equal)

    def _compare_logged(
        self, key: LogKey, whole: LogCall, calls: Sequence[LogCall]
    ) -> tuple[Rule | None, bool]:
        """How the values under a name combine, and whether only their numbers show it."""
        terms = [call.term for call in calls if call.term is not None]
        sizes = [call.weight for call in calls]
        assert whole.term is not None
        if len(terms) == len(calls) == len(self.parts):
            rules: Iterable[Rule | None] = found_rules(whole.term, terms, sizes, self._is_batch)
            if self.used is not None and key in self.used.fitted:
                rules = [self.used.logged[key]]
            for rule in rules:
                if self._is_batch(combine(terms, sizes, rule), whole.term, terms):
                    return rule, rule != own_rule(terms, sizes)
        self._compare_values(key[0], whole.value, combined_calls(calls, None))
        return None, False

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
                    about=f"{name} in {self.name}",
                )
            )

    def _compare_outputs(self, whole: DryRun, cut: DryRun) -> None:
        """Compare what the step has returned, merged as hooks and callers get it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # It is said where it is merged.
                ours = merge(cut.outputs, self.parts)
        except (RuntimeError, ValueError):  # which the run itself raises
            return
        for path, one, other in _pairs(plain(whole.outputs[0]), ours, ""):
            is_loss = bool(whole.losses) and path in ("", "['loss']")
            if is_loss or (other is not None and _is_close(other, one, self.tolerance, ())):
                continue
            self.findings.append(
                Finding(
                    "warning",
                    f"What {self.name} returns{path and f' under {path}'} is {_brief(one, other)} "
                    f"for the whole first batch, and {_brief(other, one)} for its "
                    f"{len(self.parts)} micro-batches: it is not computed for each sample alone. "
                    "AxoSparseStrategy(microbatches=1) is exact." + see("steps"),
                    about=f"output{path} of {self.name}",
                )
            )

    def _is_batch(self, value: Any, whole: Term, parts: Sequence[Term]) -> bool:
        return _is_close(value, whole.value, self.tolerance, [part.value for part in parts])


class _WeightedLoss(NamedTuple):
    """What micro-batches make up by one rule."""

    rule: Rule | None
    needs_batch: bool
    loss: float
    gradient_difference: float
    is_equal_loss: bool
    is_equal: bool


def _pairs(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The numbers in what a step has returned, and those in their places in something else."""
    if is_array(one) or isinstance(one, float):
        yield path, one, other
        return
    entries, others = children(one), children(other)
    for key, each in entries.items():
        yield from _pairs(each, others.get(key), path + key.text)


def _brief(value: Any, other: Any) -> str:
    """A number, or of an array the entry that differs most from that of another one."""
    if value is None:
        return "nothing"
    one = torch.as_tensor(value).double()
    if not one.dim():
        return f"{float(one):.6g}"
    if other is None or one.shape != torch.as_tensor(other).shape:
        return f"of shape {tuple(one.shape)}"
    number = int((one - torch.as_tensor(other).double()).abs().argmax())
    return f"{float(one.flatten()[number]):.6g} at its entry {number}"


_ROUNDING = {torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 3e-2}
"""By how much equal values of a dtype may differ, relative to their size."""


def _is_close(value: Any, expected: Any, tolerance: float, parts: Sequence[Any]) -> bool:
    """Whether a combined value is that of the batch, to rounding.

    Args:
        value: the combined value.
        expected: that of the whole batch.
        tolerance: relative to the largest of the numbers.
        parts: the values of micro-batches, which may cancel.
    """
    if isinstance(expected, Tensor):  # A run in double precision may log a metric in single.
        tolerance = max(tolerance, _ROUNDING.get(expected.dtype, 0.0))
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
