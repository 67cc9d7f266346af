"""Combines values of micro-batches to the value that a step has for the whole batch.

What a step makes of its micro-batch is a
:data:`~lightning_axosparse.pipeline.loss.terms.Term`: numbers that it has taken from the samples,
such as means and sums, and what it has computed from these. The numbers of the batch follow from
those of its micro-batches, and what is computed from them is computed again from the batch's. So
does the gradient: autograd says how much each micro-batch's value counts in that of the batch::

    self.log("rmse", mse_loss(x, y).sqrt())     the root of the weighted mean
    self.log("f1", 2 * hits / (found + true))   of the counts of the batch
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_axosparse.pipeline.loss.terms import (
    Call,
    Leaf,
    Term,
    in_order,
    leaves,
    with_values,
)
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only

Kind = Literal["mean", "sum", "samples", "max", "min"]
"""How numbers combine: a mean weighted by their denominators, a sum, a mean weighted by samples."""

_KINDS: Sequence[Kind] = ("samples", "sum", "max", "min")


class Step(NamedTuple):
    """A call of a function on what earlier entries of a formula give.

    Attributes:
        func: the function.
        places: those of its arguments that are terms, in their order.
    """

    func: Callable[..., Any]
    places: tuple[int, ...]


Formula: TypeAlias = tuple["Kind | Step", ...]
"""How a value is computed: kinds of numbers, and calls; the last entry gives the value."""

Rule: TypeAlias = Kind | Formula
"""How the terms under one name combine: as numbers, or by a formula of numbers that combine."""


class _Column(tuple[Any, ...]):
    """What stands in one place of several terms, or of the arguments of their calls."""

    def arguments(self) -> Any:
        """The positional and keyword arguments of calls, of which terms are columns."""
        return _side_by_side([(term.args, term.kwargs) for term in self])

    def parts(self) -> list[_Column]:
        """The columns in arguments of one structure, if the same function was called on them."""
        first = self[0]
        if all(isinstance(term, Call) and term.func == first.func for term in self):
            with suppress(ValueError):
                return [each for each in tree_leaves(self.arguments()) if type(each) is _Column]
        return []


def _side_by_side(arguments: Sequence[Any]) -> Any:
    """Nested arguments of several calls as those of one, in which columns are for terms.

    Raises:
        ValueError: if their structures differ.
    """
    first = arguments[0]
    if any(isinstance(each, (Leaf, Call)) for each in arguments):
        if any(type(each) in (list, tuple, dict) for each in arguments):
            raise ValueError
        return _Column(arguments)
    if type(first) in (list, tuple):
        columns_of = [_side_by_side(each) for each in zip(*arguments, strict=True)]
        return type(first)(columns_of)
    if type(first) is dict:
        if any(each.keys() != first.keys() for each in arguments):
            raise ValueError
        return {key: _side_by_side([each[key] for each in arguments]) for key in first}
    return first


def _common_rule(terms: Sequence[Term], kind_of: Callable[[Sequence[Leaf]], Kind]) -> Rule:
    """The rule of terms that were computed in the same way, as far as they were.

    Args:
        terms: at least one.
        kind_of: how a column of numbers combines.
    """
    formula, places = list[Kind | Step](), dict[_Column, int]()
    for column in in_order(_Column(terms), _Column.parts):
        parts = column.parts()
        places[column] = len(formula)
        if parts:
            formula.append(Step(column[0].func, tuple(map(places.__getitem__, parts))))
        else:
            formula.append(kind_of([_number(term) for term in column]))
    last = formula[-1]
    return tuple(formula) if isinstance(last, Step) else last


def _number(term: Any) -> Leaf:
    """A term without regard to how it was computed."""
    if isinstance(term, Leaf):
        return term
    return Leaf(term.value if isinstance(term, Call) else term)


def own_rule(terms: Sequence[Term], sizes: Sequence[float]) -> Rule:
    """How terms combine as far as their computation shows."""
    return _common_rule(terms, lambda column: _own_kind(column, sizes))


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
        own = _own_kind(of_parts, sizes)
        for kind in (own, *_KINDS):
            try:
                if is_batch(_joined(of_parts, sizes, kind), of_batch, of_parts):
                    return kind
            except (RuntimeError, TypeError, ValueError):
                return own
        return own

    yield _common_rule([whole, *parts], found)
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
        return _joined([Leaf(term.value) for term in terms], sizes, "samples")


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


def _combined(terms: Sequence[Term], rule: Rule, sizes: Sequence[float]) -> Any:
    """The value of a batch.

    Raises:
        ValueError: if the terms were not computed by the formula.
    """
    if isinstance(rule, str):
        return _joined([_number(term) for term in terms], sizes, rule)
    found: list[Any] = []
    for entry, column in zip(rule, _columns_of(terms, rule), strict=True):
        if isinstance(entry, Step):
            values = dict(zip(column.parts(), map(found.__getitem__, entry.places), strict=True))
            args, kwargs = tree_map_only(_Column, values.__getitem__, column.arguments())
            found.append(entry.func(*args, **kwargs))
        else:
            found.append(_joined([_number(term) for term in column], sizes, entry))
    return found[-1]


def _columns_of(terms: Sequence[Term], formula: Formula) -> list[_Column]:
    """What the terms have in the places of a formula."""
    columns: list[_Column] = [_Column(terms)] * len(formula)
    for place in reversed(range(len(formula))):
        entry = formula[place]
        if isinstance(entry, Step):
            parts = columns[place].parts()
            if len(parts) != len(entry.places) or columns[place][0].func != entry.func:
                raise ValueError
            for part, of in zip(parts, entry.places, strict=True):
                columns[of] = part
    return columns


_ROUNDING = 1e-5
"""Of functions that compute in single precision, relative."""


def shares(terms: Sequence[Term], sizes: Sequence[float], rule: Rule) -> list[float] | None:
    """By what the gradient of each micro-batch's value is weighted in that of the batch.

    It is how much the batch's value changes where that of the micro-batch changes by one. Arguments
    are as for :func:`combine`.

    Returns:
        The weights; zero where nothing was averaged, as over padding. None if there are none: the
        weighted values do not make up the batch's, or the gradient by several numbers is no
        multiple of the batch's, as that of a product of means.
    """
    if all(map(_is_of_nothing, terms)):
        return [0.0] * len(terms)
    copies, varied = zip(*(_varied(term, _known(term)) for term in terms), strict=True)
    with torch.enable_grad():
        whole = combine(copies, sizes, rule)
        of_whole = _slopes(whole, varied)
        found, weighted = [], []
        for copy, own, along, size in zip(copies, varied, of_whole, sizes, strict=True):
            part = combine([copy], [size], rule)
            share = 0.0 if _is_of_nothing(copy) else _ratio(along, _slopes(part, [own])[0])
            if share is None:
                return None
            found.append(share)
            weighted.append(share * _float(part) if share else 0.0)
    error = abs(sum(weighted) - _float(whole))
    return found if error <= _ROUNDING * max(map(abs, weighted)) else None


def slopes(terms: Sequence[Term], sizes: Sequence[float], rule: Rule) -> list[list[Tensor]] | None:
    """By how much the batch's value changes with each differentiable number of each micro-batch.

    Arguments are as for :func:`combine`.

    Returns:
        The gradients in double precision, in the order of :func:`leaves`; None if the terms were
        not computed as the rule says.
    """
    sources = [[leaf for leaf in leaves(term) if leaf.differentiable] for term in terms]
    copies, varied = zip(*map(_varied, terms, sources), strict=True)
    with torch.enable_grad(), _default_dtype_of(terms):
        try:
            whole = _combined(copies, rule, sizes)
        except (RuntimeError, TypeError, ValueError):
            return None
        return _slopes(whole, varied)


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


def _known(term: Term) -> Sequence[Leaf]:
    """The differentiable numbers in a term of which it is known how they combine, or else all."""
    found = [leaf for leaf in leaves(term) if leaf.differentiable and leaf.kind != "same"]
    return [leaf for leaf in found if leaf.kind is not None] or found


def _varied(term: Term, sources: Sequence[Leaf]) -> tuple[Term, list[Tensor]]:
    """A copy of a term in double precision, and the numbers by which it can be differentiated."""
    copies: dict[Term, Tensor] = {
        leaf: leaf.value.double().clone().requires_grad_() for leaf in sources
    }

    def value_of(node: Term) -> Any:
        value = copies.get(node, node.value)
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if is_float and isinstance(node, Leaf) else value

    return with_values(term, value_of), list(copies.values())


def _slopes(value: Any, sources: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """The gradients of a value by groups of sources; zeros where it does not depend on one."""
    flat = [source for group in sources for source in group]
    gradients: Sequence[Tensor] = [torch.zeros_like(source) for source in flat]
    if isinstance(value, Tensor) and value.requires_grad:
        gradients = torch.autograd.grad(value.sum(), flat, materialize_grads=True)
    found = iter(gradients)
    return [[next(found) for _ in group] for group in sources]


def _own_kind(column: Sequence[Leaf], sizes: Sequence[float]) -> Kind:
    """How numbers combine as far as their computation shows."""
    kinds = {leaf.kind for leaf in column if not leaf.is_empty}
    if kinds == {"mean"}:
        return "mean"
    if kinds <= {"sum"}:
        return "sum"
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
