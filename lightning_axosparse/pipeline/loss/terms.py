"""Records what a step computes of the numbers that it takes from its samples: terms.

A :data:`Term` is a graph: what many calls use is in it once, and visited once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only


class _Movable:
    """What ``move_data_to_device`` of Lightning moves, as it has a method ``to``."""

    __slots__ = ()

    def to(self: Any, device: Any) -> Any:
        """The same term with its tensors on a device."""
        return with_values(self, lambda node: move_data_to_device(node.value, device))


@dataclass(frozen=True, eq=False, slots=True)
class Leaf(_Movable):
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


@dataclass(frozen=True, eq=False, slots=True)
class Call(_Movable):
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a long chain of calls as a list: it would be too deep for pickle."""
        order = nodes(self)
        places = {node: _Index(index) for index, node in enumerate(order)}
        flat = [node if isinstance(node, Leaf) else _placed(node, places) for node in order]
        return _unpickled, (flat,)


Term: TypeAlias = Leaf | Call


@dataclass(frozen=True)
class _Index:
    """Stands for the term that has this index in a list."""

    value: int


def _placed(call: Call, others: Mapping[Term, Any]) -> tuple[Any, ...]:
    """The fields of a call, with others in place of the terms in its arguments."""
    placed = tree_map_only((Leaf, Call), others.__getitem__, (call.args, call.kwargs))
    return call.value, call.func, *placed


def _unpickled(flat: Sequence[Any]) -> Term:
    found: list[Term] = []
    for each in flat:
        if not isinstance(each, Leaf):
            each = Call(*tree_map_only(_Index, lambda index: found[index.value], each))
        found.append(each)
    return found[-1]


def in_order(root: Any, parts: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """What can be reached from a root, each once, behind its parts.

    Without recursion, as a loop over time steps makes chains of thousands of calls; and once, as
    what many calls use would otherwise be visited by each of these.
    """
    found: dict[Any, None] = {}
    waiting = [(root, False)]
    while waiting:
        each, has_parts = waiting.pop()
        if has_parts:
            found[each] = None
        elif each not in found:
            waiting.append((each, True))
            waiting += [(part, False) for part in reversed(list(parts(each)))]
    return list(found)


def terms_in(call: Any) -> list[Term]:
    """The terms in the arguments of a call; none of a number."""
    if not isinstance(call, Call):
        return []
    given = tree_leaves((call.args, call.kwargs))
    return [each for each in given if isinstance(each, (Leaf, Call))]


def nodes(term: Term) -> list[Term]:
    """The numbers and calls that a term was computed by, each once, and itself as the last."""
    return in_order(term, terms_in)


def with_values(term: Term, value_of: Callable[[Term], Any]) -> Term:
    """A copy of a term, in which each number and each result has another value."""
    done: dict[Term, Term] = {}
    for node in nodes(term):
        if isinstance(node, Leaf):
            done[node] = replace(node, value=value_of(node))
        else:
            _, *others = _placed(node, done)
            done[node] = Call(value_of(node), *others)
    return done[term]


def leaves(term: Term) -> list[Leaf]:
    """The numbers that a term was computed from, each once."""
    return [node for node in nodes(term) if isinstance(node, Leaf)]
