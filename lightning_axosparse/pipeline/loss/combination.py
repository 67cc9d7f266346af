"""Combines values of micro-batches to the value that a step has for the whole batch.

What a step makes of its micro-batch is a :data:`Term`: numbers that it has taken from the samples,
such as means and sums, and what it has computed from these. The numbers of the batch follow from
those of its micro-batches, and what is computed from them is computed again from the batch's. So
does the gradient: autograd says how much each micro-batch's value counts in that of the batch::

    self.log("rmse", mse_loss(x, y).sqrt())     the root of the weighted mean
    self.log("f1", 2 * hits / (found + true))   of the counts of the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

Kind = Literal["mean", "sum", "samples", "max", "min"]
"""How numbers combine: a mean weighted by their denominators, a sum, a mean weighted by samples."""


@dataclass(frozen=True, eq=False, slots=True)
class Leaf:
    """A number, or a tensor of numbers, that a step has taken from its micro-batch.

    Attributes:
        value: a detached tensor, or a number of Python.
        kind: how it combines as far as its computation shows, "same" where it comes from parameters
            and buffers alone; None if that does not show it.
        count: what a mean was divided by; of a sum the number of its entries.
        differentiable: whether the loss depends on parameters through it.
        operand: whether something was divided by it, so that it may be a count.
    """

    value: Any
    kind: Literal["mean", "sum", "same"] | None = None
    count: float = 0.0
    differentiable: bool = False
    operand: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added up, as over a micro-batch that is all padding."""
        return self.kind == "sum" and not torch.as_tensor(self.value).any()

    def to(self, device: Any) -> Leaf:
        """The same with its tensor on a device."""
        return replace(self, value=_moved(self.value, device))


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A value that a function has computed from other terms.

    Attributes:
        value: the result: a detached tensor, or a number.
        func: a function of torch.
        args: its arguments: terms, sequences of terms, and what is no number.
        kwargs: its keyword arguments.
        size: how many numbers it was computed from, each counted as often as it is used.
    """

    value: Any
    func: Callable[..., Any]
    args: Any
    kwargs: Any = field(default_factory=dict)
    size: int = 1

    @property
    def name(self) -> str:
        """Without underscores: ``__radd__``, ``add_`` and ``add`` are one."""
        return str(getattr(self.func, "__name__", "")).strip("_")

    def to(self, device: Any) -> Call:
        """The same with all tensors on a device."""
        args, kwargs = (
            mapped(each, lambda leaf: leaf.to(device)) for each in (self.args, self.kwargs)
        )
        return Call(_moved(self.value, device), self.func, args, kwargs)


Term: TypeAlias = Leaf | Call


def mapped(term: Any, function: Callable[[Leaf], Leaf]) -> Any:
    """A copy of a term, or of nested arguments of a call, with a function applied to each leaf."""
    if isinstance(term, Leaf):
        return function(term)
    if isinstance(term, Call):
        args, kwargs = mapped(term.args, function), mapped(term.kwargs, function)
        return Call(term.value, term.func, args, kwargs)
    if type(term) in (list, tuple):
        return type(term)([mapped(each, function) for each in term])
    if type(term) is dict:
        return {key: mapped(each, function) for key, each in term.items()}
    return term


def _moved(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


_KINDS: Sequence[Kind] = ("samples", "sum", "max", "min")


class Shape(NamedTuple):
    """How a call combines: its function, and how its arguments do.

    Attributes:
        func: the function.
        args: of each argument that holds terms its :data:`Rule`; of others None.
        kwargs: the same of keyword arguments.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any


Rule: TypeAlias = Kind | Shape
"""How the terms under one name combine: as numbers, or by calling a function with what combines."""


def common_rule(terms: Sequence[Any], kind_of: Callable[[Sequence[Leaf]], Kind]) -> Any:
    """The rule of terms that were computed in the same way, as far as they were.

    Args:
        terms: terms, or arguments of calls that hold some.
        kind_of: how a column of numbers combines.

    Returns:
        The rule; for nested arguments nested rules, and None for what is no term.
    """
    first = terms[0]
    if isinstance(first, Call) and all(
        isinstance(term, Call) and term.func == first.func for term in terms
    ):
        try:
            args, kwargs = (
                common_rule(list(each), kind_of)
                for each in zip(*((term.args, term.kwargs) for term in terms), strict=True)
            )
            return Shape(first.func, args, kwargs)
        except ValueError:
            pass
    if any(isinstance(term, (Leaf, Call)) for term in terms):
        return kind_of([_number(term) for term in terms])
    if type(first) in (list, tuple):
        if len({len(term) for term in terms}) > 1:
            raise ValueError
        return type(first)([common_rule(list(c), kind_of) for c in zip(*terms, strict=True)])
    if type(first) is dict:
        return {key: common_rule([term[key] for term in terms], kind_of) for key in first}
    return None


def _number(term: Any) -> Leaf:
    """A term without regard to how it was computed."""
    if isinstance(term, Leaf):
        return term
    return Leaf(term.value if isinstance(term, Call) else term)


def own_rule(terms: Sequence[Term], sizes: Sequence[float]) -> Rule:
    """How terms combine as far as their computation shows."""
    rule: Rule = common_rule(terms, lambda column: own_kind(column, sizes))
    return rule


def found_rules(
    whole: Term,
    parts: Sequence[Term],
    sizes: Sequence[float],
    is_batch: Callable[[Any, Term, Sequence[Term]], bool],
) -> Iterator[Rule]:
    """The ways in which terms may combine to what the step has computed of the whole batch.

    Args:
        whole: the term of the whole batch.
        parts: those of its micro-batches.
        sizes: samples of each micro-batch.
        is_batch: whether a combined value is that of the first term, which the others make up.

    Returns:
        Rules, beginning with what the computation and its numbers show.
    """

    def found(column: Sequence[Leaf]) -> Kind:
        of_batch, *of_parts = column
        own = own_kind(of_parts, sizes)
        for kind in (own, *_KINDS):
            try:
                if is_batch(_joined(of_parts, sizes, kind), of_batch, of_parts):
                    return kind
            except (RuntimeError, TypeError, ValueError):
                return own
        return own

    yield common_rule([whole, *parts], found)
    yield own_rule(parts, sizes)
    yield from _KINDS


def combine(terms: Sequence[Term], sizes: Sequence[float], rule: Rule | None = None) -> Any:
    """The value of a batch: a tensor or a number.

    Args:
        terms: one for each micro-batch.
        sizes: samples of each micro-batch, or the weights that the user has given.
        rule: how they combine; None for what their computation shows. Terms that were computed in
            another way are averaged over samples.
    """
    rule = own_rule(terms, sizes) if rule is None else rule
    try:
        with _default_dtype_of(terms):
            return _combined(terms, rule, sizes)
    except (RuntimeError, TypeError, ValueError):
        return _joined([_number(Call(t.value, combine, ())) for t in terms], sizes, "samples")


@contextmanager
def _default_dtype_of(terms: Sequence[Term]) -> Iterator[None]:
    """Let quotients of whole numbers be in double precision, if the step has computed in it."""
    before = torch.get_default_dtype()
    if getattr(terms[0].value, "dtype", None) == torch.float64:
        torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _combined(terms: Sequence[Any], rule: Any, sizes: Sequence[float]) -> Any:
    if isinstance(rule, str):
        return _joined([_number(term) for term in terms], sizes, cast(Kind, rule))
    if isinstance(rule, Shape):
        if not all(isinstance(term, Call) and term.func == rule.func for term in terms):
            raise ValueError
        args = _combined([term.args for term in terms], rule.args, sizes)
        kwargs = _combined([term.kwargs for term in terms], rule.kwargs, sizes)
        return rule.func(*args, **kwargs)
    if type(rule) in (list, tuple):
        columns = zip(rule, *terms, strict=True)
        return type(rule)([_combined(column, of, sizes) for of, *column in columns])
    if type(rule) is dict:
        return {key: _combined([t[key] for t in terms], of, sizes) for key, of in rule.items()}
    return terms[0]


_ROUNDING = 1e-5
"""Of functions that compute in single precision, relative."""


def shares(terms: Sequence[Term], sizes: Sequence[float], rule: Rule) -> list[float] | None:
    """By what the gradient of each micro-batch's value is weighted in that of the batch.

    It is how much the batch's value changes where that of the micro-batch changes by one.

    Args:
        terms: one for each micro-batch.
        sizes: samples of each micro-batch.
        rule: how they combine.

    Returns:
        The weights; zero where nothing was averaged, as over padding. None if there are none: the
        weighted values do not make up the batch's, or the gradient by several numbers is no
        multiple of the batch's, as that of a product of means.
    """
    if all(map(_is_of_nothing, terms)):
        return [0.0] * len(terms)
    copies, varied = zip(*(_varied(term, constants=False) for term in terms), strict=True)
    with torch.enable_grad():
        whole = combine(copies, sizes, rule)
        along = iter(_slopes(whole, [each for own in varied for each in own]))
        found, weighted = [], []
        for copy, own, size in zip(copies, varied, sizes, strict=True):
            part = combine([copy], [size], rule)
            of_whole = [next(along) for _ in own]
            share = 0.0 if _is_of_nothing(copy) else _ratio(of_whole, _slopes(part, own))
            if share is None:
                return None
            found.append(share)
            weighted.append(share * _float(part) if share else 0.0)
    error = abs(sum(weighted) - _float(whole))
    return found if error <= _ROUNDING * max(map(abs, weighted)) else None


def slopes(terms: Sequence[Term], sizes: Sequence[float], rule: Rule) -> list[list[Tensor]] | None:
    """By how much the batch's value changes with each differentiable number of each micro-batch.

    Args:
        terms: one for each micro-batch.
        sizes: samples of each micro-batch.
        rule: how they combine.

    Returns:
        The gradients in double precision, in the order of :func:`leaves`; None if the terms were
        not computed as the rule says.
    """
    copies, varied = zip(*(_varied(term, constants=True) for term in terms), strict=True)
    with torch.enable_grad(), _default_dtype_of(terms):
        try:
            whole = _combined(copies, rule, sizes)
        except (RuntimeError, TypeError, ValueError):
            return None
        found = iter(_slopes(whole, [each for own in varied for each in own]))
    return [[next(found) for _ in own] for own in varied]


def _ratio(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> float | None:
    """By what gradients are multiples of others; zero where those are zero or not finite.

    None if they are no multiples.
    """
    scale = float(sum((other * other).sum() for other in others))
    if not scale or not math.isfinite(scale):
        return 0.0
    pairs = list(zip(gradients, others, strict=True))
    ratio = float(sum((one * other).sum() for one, other in pairs)) / scale
    for one, other in pairs:
        if float((one - ratio * other).norm()) > _ROUNDING * float(one.norm()):
            return None
    return ratio


def _is_of_nothing(term: Term) -> bool:
    """Whether a term was computed from sums over no entries, as of padding."""
    found = leaves(term)
    kinds = {leaf.kind for leaf in found if not leaf.is_empty}
    return any(leaf.is_empty for leaf in found) and kinds.isdisjoint({"sum", "mean"})


def _float(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _varied(term: Term, constants: bool) -> tuple[Term, list[Tensor]]:
    """A term in double precision, and the numbers in it on which the gradient depends.

    Args:
        term: the term.
        constants: whether parameters are among them, and numbers of which nothing is known.
    """
    found: list[tuple[bool, Tensor]] = []

    def varied(leaf: Leaf) -> Leaf:
        if not isinstance(leaf.value, Tensor) or not leaf.value.is_floating_point():
            return leaf
        value = leaf.value.detach().double()
        if leaf.differentiable and (constants or leaf.kind != "same"):
            value = value.clone().requires_grad_()
            found.append((constants or leaf.kind is not None, value))
        return replace(leaf, value=value)

    copy = cast(Term, mapped(term, varied))
    # Of a number of which nothing is known, it is not known by what it is weighted either.
    known = [value for is_known, value in found if is_known]
    return copy, known or [value for _, value in found]


def _slopes(value: Any, sources: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a value; zeros where it does not depend on a source."""
    zeros = [torch.zeros_like(source) for source in sources]
    if not isinstance(value, Tensor) or not value.requires_grad:
        return zeros
    found = torch.autograd.grad(value.sum(), sources, allow_unused=True)
    return [zero if each is None else each for zero, each in zip(zeros, found, strict=True)]


def own_kind(column: Sequence[Leaf], sizes: Sequence[float]) -> Kind:
    """How numbers combine as far as their computation shows."""
    kinds = {leaf.kind for leaf in column if not leaf.is_empty} or {"sum"}
    if kinds in ({"mean"}, {"sum"}):
        return "mean" if kinds == {"mean"} else "sum"
    counts = all(
        leaf.operand and type(leaf.value) is int and leaf.value == size
        for leaf, size in zip(column, sizes, strict=True)
    )
    return "sum" if counts else "samples"


def _joined(column: Sequence[Leaf], sizes: Sequence[float], kind: Kind) -> Any:
    values = [leaf.value for leaf in column]
    numbers = not any(isinstance(value, Tensor) for value in values)
    if kind == "samples" and numbers and len(set(values)) == 1:
        return values[0]
    if len(values) == 1:
        return values[0].clone() if isinstance(values[0], Tensor) else values[0]
    tensors = [
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for value in values
    ]
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ValueError
    if kind in ("sum", "max", "min"):
        joined = getattr(torch.stack(tensors), {"max": "amax", "min": "amin"}.get(kind, kind))(0)
    else:
        by_count = kind == "mean" and all(leaf.kind == "mean" or leaf.is_empty for leaf in column)
        weights = [leaf.count for leaf in column] if by_count else list(sizes)
        joined = _weighted_mean(tensors, weights)
    return joined.item() if numbers else joined


def _weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of tensors of one shape; NaN where nothing at all was averaged."""
    total = sum(weights)
    # A mean over nothing is NaN, with weight zero.
    terms = [
        value.double() * (weight / total)
        for value, weight in zip(values, weights, strict=True)
        if weight
    ]
    first = values[0]
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
    if not terms:
        return torch.full_like(first, torch.nan, dtype=dtype)
    return torch.stack(terms).sum(0).to(dtype)


def columns(terms: Sequence[Term]) -> list[tuple[Leaf, ...]]:
    """The numbers that terms were computed from, those in one place together."""
    return list(zip(*map(leaves, terms), strict=False))


def are_proportional(numbers: Sequence[Leaf], sizes: Sequence[float]) -> bool:
    """Whether the denominators of means are proportional to samples."""
    return len({leaf.count / size for leaf, size in zip(numbers, sizes, strict=True)}) == 1


def size_of(term: Any) -> int:
    """How many numbers a term, or nested arguments of a call, was computed from."""
    if isinstance(term, (list, tuple)):
        return sum(map(size_of, term))
    if isinstance(term, dict):
        return sum(map(size_of, term.values()))
    return term.size if isinstance(term, Call) else int(isinstance(term, Leaf))


def leaves(term: Any) -> list[Leaf]:
    """The numbers that a term, or nested arguments of a call, was computed from."""
    if isinstance(term, Leaf):
        return [term]
    found: list[Leaf] = []
    parts = (term.args, term.kwargs) if isinstance(term, Call) else term
    if type(parts) in (list, tuple, dict):
        for each in parts.values() if type(parts) is dict else parts:
            found += leaves(each)
    return found
