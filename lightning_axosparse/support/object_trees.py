"""Takes the tensors out of any object, and puts others in their places.

Pytrees end at objects that torch does not know: dataclasses, namespaces, sets, classes of the
user's. Pickle goes through all of them, and asks of each object that it meets whether it is stored
apart. So tensors are found wherever an object keeps them, in the order in which pickle meets them.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeAlias

import torch

from lightning_axosparse.support.torch_internals import SUPPORTED_NODES, tree_leaves, tree_map

Kinds: TypeAlias = "type | tuple[type, ...]"
"""The types of the objects that are taken out."""

PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes),
    *(torch.Size, torch.dtype, torch.device, slice, range, type(Ellipsis)),
)
"""Types of values that hold no others."""

_ERRORS = (pickle.PicklingError, AttributeError, NotImplementedError, TypeError, ValueError)
"""What objects raise that cannot be pickled."""


class CannotPickle(TypeError):
    """An object cannot be taken apart, because something in it cannot be pickled."""


def take_apart(tree: Any, kinds: Kinds) -> tuple[bytes, list[Any]]:
    """Pickle an object without the objects of some types that it holds.

    Returns:
        What is left, for :func:`put_together`, and the objects that were taken out.

    Raises:
        CannotPickle: if there is something in it that cannot be pickled.
    """
    try:
        return _take_apart(tree, kinds, _Taking)
    except _ERRORS:
        pass
    try:
        return _take_apart(tree, kinds, _taking_by_value())
    except (*_ERRORS, RecursionError) as error:
        raise CannotPickle(f"{type(tree).__name__}: {error}") from error


def _take_apart(tree: Any, kinds: Kinds, pickler: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    taking = pickler(file, pickle.HIGHEST_PROTOCOL)
    taking.kinds, taking.taken = kinds, []
    taking.dump(tree)
    return file.getvalue(), taking.taken


class _Taking(pickle.Pickler):
    kinds: Kinds
    taken: list[Any]

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, self.kinds):
            self.taken.append(value)
            return len(self.taken) - 1
        return None

    def reducer_override(self, value: Any) -> Any:
        """Pickle an object whose class allows no assignment, or has its own way of it, without."""
        kind: Any = type(value)
        has_own_way = (
            isinstance(value, type)
            or kind in getattr(self, "dispatch_table", copyreg.dispatch_table)
            or hasattr(kind, "__setstate__")
            or kind.__reduce_ex__ is not object.__reduce_ex__
            or kind.__reduce__ is not object.__reduce__
        )
        if kind.__setattr__ is object.__setattr__ or has_own_way:
            return NotImplemented
        made, arguments, state, *entries = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return made, arguments, state, *entries, _set_state


def _set_state(made: Any, state: Any) -> None:
    """Set the attributes of an object, those of its dict and those of slots."""
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, value in (attributes or {}).items():
            object.__setattr__(made, name, value)


@cache
def _taking_by_value() -> Any:
    """Of classes and functions that cannot be imported the definition is pickled."""
    # Imported here, because few trees need it.
    import cloudpickle

    class TakingByValue(cloudpickle.Pickler):  # type: ignore[misc]
        persistent_id = _Taking.persistent_id

        def reducer_override(self, value: Any) -> Any:
            reduced = _Taking.reducer_override(self, value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return TakingByValue


def put_together(rest: bytes, given: Sequence[Any]) -> Any:
    """Make an object again, with other objects in the places of those that were taken out."""
    putting = _Putting(io.BytesIO(rest))
    putting.given = given
    return putting.load()


class _Putting(pickle.Unpickler):
    given: Sequence[Any]

    def persistent_load(self, number: Any) -> Any:
        return self.given[number]


def object_leaves(tree: Any, kinds: Kinds) -> list[Any]:
    """The objects of some types in any object, in order.

    Something that cannot be pickled counts as if it held none.
    """
    leaves, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if isinstance(node, kinds):
            leaves.append(node)
        elif kind is tuple or kind is list:
            waiting += node[::-1]
        elif kind is dict:
            waiting += reversed(node.values())
        elif kind in SUPPORTED_NODES:
            waiting += tree_leaves(node)[::-1]
        elif not isinstance(node, PLAIN):
            with suppress(CannotPickle):
                leaves += take_apart(node, kinds)[1]
    return leaves


def object_map(
    kinds: Kinds,
    function: Callable[[Any], Any],
    tree: Any,
    unless_pickled: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A copy of any object in which a function has replaced the objects of some types, in order.

    Args:
        kinds: the types.
        function: what replaces them.
        tree: the object; what holds none of the types in it is not copied.
        unless_pickled: what replaces something in it that cannot be pickled, or not made again.
    """
    if isinstance(tree, kinds):
        return function(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([object_map(kinds, function, child, unless_pickled) for child in tree])
    if kind is dict:
        return {k: object_map(kinds, function, v, unless_pickled) for k, v in tree.items()}
    if isinstance(tree, PLAIN):
        return tree
    if kind in SUPPORTED_NODES:
        return tree_map(lambda v: object_map(kinds, function, v, unless_pickled), tree)
    try:
        rest, taken = take_apart(tree, kinds)
    except CannotPickle:
        return unless_pickled(tree)
    if not taken:
        return tree
    replaced = [function(each) for each in taken]
    try:
        return put_together(rest, replaced)
    except _ERRORS:  # Of a class that takes other arguments than it is copied with.
        return unless_pickled(tree)
