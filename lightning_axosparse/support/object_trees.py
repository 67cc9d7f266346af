"""Takes the tensors out of any object, and puts others in their places.

Pytrees end at objects that torch does not know: dataclasses, namespaces, sets, the user's classes.
Pickle goes through all of them, and its ``persistent_id`` says for each object whether it is stored
separately. So tensors are found anywhere in an object, in the order of pickle.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
"""Types of values that contain no others."""

PICKLE_ERRORS = (pickle.PicklingError, AttributeError, NotImplementedError, TypeError, ValueError)
"""Exceptions of objects that cannot be pickled, or not be loaded again."""


class CannotPickle(TypeError):
    """An object cannot be taken apart, because something in it cannot be pickled."""


@dataclass
class TakenApart:
    """Describes an object whose class might refuse what describes its tensors.

    Attributes:
        rest: the pickled rest, for :func:`put_together`.
        taken: the objects that were taken out, or their replacements.
    """

    rest: bytes
    taken: list[Any]


def take_apart(tree: Any, kinds: Kinds) -> tuple[bytes, list[Any]]:
    """Pickle an object without the objects of some types in it.

    Returns:
        The pickled rest, for :func:`put_together`, and the objects that were taken out.

    Raises:
        CannotPickle: if something in the object cannot be pickled.
    """
    try:
        return _take_apart(tree, kinds, _TakingPickler)
    except PICKLE_ERRORS:
        pass
    try:
        return _take_apart(tree, kinds, _by_value_pickler())
    except (*PICKLE_ERRORS, RecursionError) as error:
        raise CannotPickle(f"{type(tree).__name__}: {error}") from error


def _take_apart(tree: Any, kinds: Kinds, pickler: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    writer = pickler(file, pickle.HIGHEST_PROTOCOL)
    writer.kinds, writer.taken = kinds, []
    writer.dump(tree)
    return file.getvalue(), writer.taken


class _TakingPickler(pickle.Pickler):
    kinds: Kinds
    taken: list[Any]

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, self.kinds):
            self.taken.append(value)
            return len(self.taken) - 1
        return None

    def reducer_override(self, value: Any) -> Any:
        """Pickle objects so that no ``__setattr__`` of their class is called when they are loaded.

        Such a method may refuse assignments, as that of a frozen dataclass does. Classes that
        define how they are pickled are left to pickle.
        """
        kind: Any = type(value)
        defines_pickling = (
            isinstance(value, type)
            or kind in getattr(self, "dispatch_table", copyreg.dispatch_table)
            or hasattr(kind, "__setstate__")
            or kind.__reduce_ex__ is not object.__reduce_ex__
            or kind.__reduce__ is not object.__reduce__
        )
        if kind.__setattr__ is object.__setattr__ or defines_pickling:
            return NotImplemented
        create, arguments, state, *entries = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return create, arguments, state, *entries, _set_state


def _set_state(value: Any, state: Any) -> None:
    """Set the attributes of an object, those in its ``__dict__`` and those in slots."""
    for attributes in state if isinstance(state, tuple) else (state,):
        for name, attribute in (attributes or {}).items():
            object.__setattr__(value, name, attribute)


@cache
def _by_value_pickler() -> Any:
    """Return a pickler that stores the definitions of classes that cannot be imported."""
    # Imported here, because few trees need it.
    import cloudpickle

    class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        persistent_id = _TakingPickler.persistent_id

        def reducer_override(self, value: Any) -> Any:
            reduced = _TakingPickler.reducer_override(self, value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return ByValuePickler


def put_together(rest: bytes, replacements: Sequence[Any]) -> Any:
    """Load an object, with other objects in the places of those that were taken out."""
    unpickler = _ReplacingUnpickler(io.BytesIO(rest))
    unpickler.replacements = replacements
    return unpickler.load()


class _ReplacingUnpickler(pickle.Unpickler):
    replacements: Sequence[Any]

    def persistent_load(self, number: Any) -> Any:
        return self.replacements[number]


def object_leaves(tree: Any, kinds: Kinds) -> list[Any]:
    """Return the objects of some types in any object, in order.

    Objects inside something that cannot be pickled are not found.
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
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a copy of any object in which the objects of some types are replaced, in order.

    Args:
        kinds: the types.
        function: returns the replacement of an object.
        tree: the object; parts with no object of these types are not copied.
        other: returns the replacement of a part that torch does not know. By default, its class
            makes a copy; a part that cannot be pickled, or not be loaded again, is not copied.
    """
    if isinstance(tree, kinds):
        return function(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([object_map(kinds, function, child, other) for child in tree])
    if kind is dict:
        return {k: object_map(kinds, function, v, other) for k, v in tree.items()}
    if isinstance(tree, PLAIN):
        return tree
    if kind in SUPPORTED_NODES:
        return tree_map(lambda v: object_map(kinds, function, v, other), tree)
    if kind is TakenApart:
        return TakenApart(tree.rest, [function(each) for each in tree.taken])
    if other is not None:
        return other(tree)
    try:
        rest, taken = take_apart(tree, kinds)
    except CannotPickle:
        return tree
    replaced = [function(each) for each in taken]
    try:
        return put_together(rest, replaced) if taken else tree
    except PICKLE_ERRORS:  # Of a class whose pickled form does not fit its constructor.
        return tree
