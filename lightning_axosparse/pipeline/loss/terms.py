"""Records what a step computes of the numbers that it takes from its samples: terms.

A :data:`Term` is a graph: what many calls use is in it once, and visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only


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
    """

    value: Any
    func: Callable[..., Any]
    args: Any
    kwargs: Any = field(default_factory=dict)

    def to(self, device: Any) -> Term:
        """The same with all tensors on a device."""
        return mapped(self, lambda leaf: leaf.to(device), lambda value: _moved(value, device))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a long chain of calls as a list: it would be too deep for pickle."""
        order = nodes(self)
        places = {id(node): _Place(place) for place, node in enumerate(order)}
        flat = [node if isinstance(node, Leaf) else _placed(node, places) for node in order]
        return _unpickled, (flat,)


Term: TypeAlias = Leaf | Call


@dataclass(frozen=True)
class _Place:
    """Stands for the term at a place of a list."""

    index: int


def _placed(call: Call, terms: Mapping[int, Any]) -> tuple[Any, ...]:
    """The fields of a call, with others in place of the terms in its arguments, by their ids."""
    arguments = call.args, call.kwargs
    placed = tree_map_only((Leaf, Call), lambda each: terms[id(each)], arguments)
    return call.value, call.func, *placed


def _unpickled(flat: Sequence[Any]) -> Term:
    found: list[Term] = []
    for each in flat:
        if not isinstance(each, Leaf):
            each = Call(*tree_map_only(_Place, lambda place: found[place.index], each))
        found.append(each)
    return found[-1]


def in_order(root: Any, parts: Callable[[Any], Iterable[Any]], key: Any = id) -> list[Any]:
    """What can be reached from a root, each once, behind its parts.

    Without recursion, as a loop over time steps makes chains of thousands of calls; and once, as
    what many calls use would otherwise be visited by each of these.
    """
    found: dict[Any, Any] = {}
    waiting = [(root, False)]
    while waiting:
        each, has_parts = waiting.pop()
        if has_parts:
            found[key(each)] = each
        elif key(each) not in found:
            waiting.append((each, True))
            waiting += [(part, False) for part in reversed(list(parts(each)))]
    return list(found.values())


def terms_in(call: Any) -> list[Term]:
    """The terms in the arguments of a call; none of a number."""
    if not isinstance(call, Call):
        return []
    given = tree_leaves((call.args, call.kwargs))
    return [each for each in given if isinstance(each, (Leaf, Call))]


def nodes(term: Term) -> list[Term]:
    """The numbers and calls that a term was computed by, each once, and itself as the last."""
    return in_order(term, terms_in)


def mapped(
    term: Term,
    function: Callable[[Leaf], Leaf],
    of_result: Callable[[Any], Any] = lambda value: value,
) -> Term:
    """A copy of a term with a function applied to each of its numbers, and one to each result."""
    done: dict[int, Term] = {}
    for node in nodes(term):
        if isinstance(node, Leaf):
            done[id(node)] = function(node)
        else:
            value, *others = _placed(node, done)
            done[id(node)] = Call(of_result(value), *others)
    return done[id(term)]


def _moved(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def leaves(term: Term) -> list[Leaf]:
    """The numbers that a term was computed from, each once."""
    return [node for node in nodes(term) if isinstance(node, Leaf)]
