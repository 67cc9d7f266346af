"""Captures what a step may change on a module: parameters, buffers and attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.batch.layout import Key
from lightning_axosparse.pipeline.norms import Norm
from lightning_axosparse.pipeline.state.values import (
    MISSING,
    copied,
    entries,
    is_collection,
    is_long,
    is_object,
    is_readable,
    of_library,
    overwrite,
    same,
)
from lightning_axosparse.support.torch_internals import (
    OperatorMode,
    mutated_arguments,
    storage_id,
)

Step = tuple[str, Any]
"""An attribute's name after ".", or the key of an entry after "[]"."""


class Place(NamedTuple):
    """Where an attribute is: of the module, of a part of it, or of an object that it holds.

    Attributes:
        owner: the way from the module to what has the attribute.
        name: of the attribute.
    """

    owner: tuple[Step, ...]
    name: str

    def __str__(self) -> str:
        """What a user would write: ``self.meters['loss'].total``."""
        return "self" + "".join(map(_spelled, (*self.owner, (".", self.name))))

    @property
    def dotted(self) -> str:
        """The name as ``module.named_buffers()`` spells it, as far as it leads through modules."""
        names = []
        for kind, key in (*self.owner, (".", self.name)):
            if kind != ".":
                break
            names.append(key)
        return ".".join(names)


def _spelled(step: Step) -> str:
    kind, key = step
    if kind == ".":
        return f"[{key}]" if key.isdecimal() else f".{key}"
    return f"[{key!r}]"


def owner_of(module: nn.Module, place: Place) -> Any:
    """What has the attribute of a place; None if it is gone."""
    owner: Any = module
    try:
        for kind, key in place.owner:
            owner = namespace_of(owner, key)[key] if kind == "." else owner[key]
        vars(owner)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return owner


def namespace_of(owner: Any, name: str) -> MutableMapping[str, Any]:
    """The dict that holds the value of an attribute, or would hold it."""
    if isinstance(owner, nn.Module):
        namespaces: tuple[Any, ...] = (owner._parameters, owner._buffers, owner._modules)
        for tensors in namespaces:
            if name in tensors:
                return cast("MutableMapping[str, Any]", tensors)
    attributes: dict[str, Any] = vars(owner)
    return attributes


def inherited(owner: Any) -> dict[str, Any]:
    """The values that a user's class gives attributes of its objects."""
    return {
        name: value
        for kind in reversed(type(owner).__mro__)
        if not of_library(kind)
        for name, value in vars(kind).items()
        if isinstance(value, _INHERITED) and not name.startswith("__")
    }


_INHERITED = (bool, int, float, list, set, dict, deque, Tensor, np.ndarray)


@dataclass
class _Attribute:
    """An attribute as it was captured.

    Attributes:
        namespace: the dict that has it.
        value: the object that it held.
        before: a copy of that.
        contents: the tensors, arrays and collections in it, each with what it held.
        is_inherited: whether the class had it, and not the owner itself.
    """

    namespace: MutableMapping[str, Any]
    value: Any
    before: Any
    contents: list[tuple[Any, Any]]
    is_inherited: bool

    def is_same(self, value: Any) -> bool:
        """Whether the attribute holds what it held."""
        if value is self.value and isinstance(value, nn.Parameter) and not self.contents:
            # Nothing has been written to its memory.
            is_there: bool = value.data_ptr() == self.before.data_ptr()
            return is_there and value.shape == self.before.shape
        return same(self.before, value)

    def put_back(self, name: str, owner: Any) -> None:
        """Give the attribute the object back that it held, with its content."""
        now = namespace_of(owner, name)
        if now is not self.namespace or self.is_inherited:
            now.pop(name, None)
        if not self.is_inherited:
            self.namespace[name] = self.value
        if isinstance(self.value, nn.Parameter) and not self.contents:
            self.value.data = self.before
        for holder, content in self.contents:
            if not _holds(holder, content):
                overwrite(holder, content)


@dataclass
class _Owner:
    """What has attributes: a part of the module, or an object that one holds."""

    path: tuple[Step, ...]
    owner: Any
    attributes: dict[str, _Attribute] = field(default_factory=dict)


class Writes(OperatorMode):
    """Notes which memory operators are about to write to, whatever they write.

    Args:
        note: called with the number of a storage before the first write to it.

    Attributes:
        storages: the numbers of the storages.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in mutated_arguments(func, args, kwargs):
            if isinstance(leaf, Tensor) and is_readable(leaf):
                storage = storage_id(leaf.untyped_storage())
                if storage not in self.storages:
                    self.storages.add(storage)
                    self._note(storage)
        return func(*args, **kwargs)


class ModuleState:
    """The values of all that a step may change on a module, at the time when it is created.

    Left out are the states of torchmetrics objects, which have their own way, tensors without
    values, and what torch and Lightning keep in a module. The running statistics of BatchNorms,
    which follow micro-batches as they do, are put back, but are not named as changes. Parameters
    may fill the memory: they are copied when they are about to change (:meth:`watched`). Hooks that
    were registered since, as by a library at its first call, are removed again.

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        clones: dict[int, Any] = {}
        self._parameters: dict[int, list[_Attribute]] = {}
        self._owners = [_Owner(path, owner) for path, owner in _owners(module)]
        for each in self._owners:
            for name, value in _attributes(each.owner):
                each.attributes[name] = self._captured(each.owner, name, value, clones)
        registries = (vars(part).get(name, {}) for part in module.modules() for name in _HOOKS)
        self._hooks = [(registry, copy.copy(registry)) for registry in registries]

    def _captured(self, owner: Any, name: str, value: Any, clones: dict[int, Any]) -> _Attribute:
        namespace = namespace_of(owner, name)
        if isinstance(value, nn.Parameter):
            # `parameter.data = other` gives it other memory.
            attribute = _Attribute(namespace, value, value.detach(), [], False)
            storage = storage_id(value.untyped_storage())
            self._parameters.setdefault(storage, []).append(attribute)
            return attribute
        before, contents = copied(value, clones), list(_contents(value, clones))
        return _Attribute(namespace, value, before, contents, namespace.get(name) is not value)

    @contextmanager
    def watched(self) -> Iterator[set[Place]]:
        """Copy the parameters that operators in the context are about to change.

        Yields:
            Filled at the end: the tensors that they have written to, even if these are equal.
        """
        written: set[Place] = set()
        with Writes(self._save) as writes:
            yield written
        written |= self._places_of(writes.storages)

    def _save(self, storage: int) -> None:
        """Copy the parameters that have some memory."""
        for attribute in self._parameters.get(storage, ()):
            if not attribute.contents:
                attribute.before = attribute.before.clone()
                attribute.contents.append((attribute.value, attribute.before))

    def before(self, place: Place) -> Any:
        """A copy of the value that was captured; ``MISSING`` if there was none."""
        owner = next((each for each in self._owners if each.path == place.owner), None)
        if owner is None or place.name not in owner.attributes:
            return MISSING
        return owner.attributes[place.name].before

    def _places_of(self, storages: Collection[int]) -> set[Place]:
        return {
            Place(each.path, name)
            for each in self._owners
            for name, attribute in each.attributes.items()
            if not _is_statistic(each.owner, name)
            for holder, _ in attribute.contents
            if isinstance(holder, Tensor) and is_readable(holder)
            if storage_id(holder.untyped_storage()) in storages
        }

    def rewind(self) -> dict[Place, Any]:
        """Put back what was captured, into the same objects.

        Returns:
            What had changed: copies of the values; ``MISSING`` for an attribute that was deleted.
        """
        changes: dict[Place, Any] = {}
        for registry, before in self._hooks:
            if registry != before:
                registry.clear()
                registry.update(before)
        for each in self._owners:
            now = dict(_attributes(each.owner))
            for name in dict.fromkeys([*each.attributes, *now]):
                was, value = each.attributes.get(name), now.get(name, MISSING)
                is_same = was is not None and was.is_same(value)
                if not (is_same or _is_statistic(each.owner, name)):
                    changes[Place(each.path, name)] = _clone(value)
                if was is None:
                    del namespace_of(each.owner, name)[name]
                elif not is_same or was.value is not value:
                    was.put_back(name, each.owner)
        return changes


def _is_statistic(owner: Any, name: str) -> bool:
    """Whether an attribute is a running statistic of a BatchNorm."""
    return isinstance(owner, Norm) and name in owner._buffers


def _clone(value: Any) -> Any:
    return copied(value.detach() if isinstance(value, nn.Parameter) else value, objects=True)


def write(module: nn.Module, place: Place, value: Any) -> None:
    """Give an attribute a value, in place where its object can take it.

    Args:
        module: the user's module.
        place: the attribute.
        value: ``MISSING`` to delete it.
    """
    owner = owner_of(module, place)
    if owner is None:
        return
    namespace = namespace_of(owner, place.name)
    if value is MISSING:
        namespace.pop(place.name, None)
    elif not overwrite(namespace.get(place.name), value):
        namespace[place.name] = value


def _owners(module: nn.Module) -> Iterator[tuple[tuple[Step, ...], Any]]:
    """Whatever has attributes: the module, its parts and what they hold; each object once.

    A part that has several names has the one that ``module.named_modules()`` gives it.
    """
    waiting: list[tuple[tuple[Step, ...], Any]] = [((), module)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or isinstance(value, (Metric, MetricCollection)):
            continue
        held = list(_held(value))
        if isinstance(value, nn.Module) or is_object(value):
            yield path, value
        elif not held:
            continue
        seen.add(id(value))
        waiting.extend(((*path, step), each) for step, each in reversed(held))


def _held(value: Any) -> Iterator[tuple[Step, Any]]:
    """What a module, an object or a collection holds, with the last step of the way to it."""
    if isinstance(value, nn.Module):
        for name, part in value._modules.items():
            yield (".", name), part
    if isinstance(value, nn.Module) or is_object(value):
        for name, each in _attributes(value):
            yield (".", name), each
    elif is_collection(value) and not is_long(value):
        for key, each in entries(value).items():
            yield _step(key), each


def _step(key: Key) -> Step:
    is_attribute = key.text.startswith(".") and isinstance(key.value, str)
    return "." if is_attribute else "[]", key.value


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that a step may change, or of an object."""
    if not isinstance(owner, nn.Module):
        yield from {**inherited(owner), **vars(owner)}.items()
        return
    for name, tensor in chain(owner._parameters.items(), owner._buffers.items()):
        if tensor is None or is_readable(tensor):
            yield name, tensor
    own = _OWN_OF_LIGHTNING if isinstance(owner, LightningModule) else _OWN
    for name, value in {**inherited(owner), **vars(owner)}.items():
        if name not in own:
            yield name, value


_OWN = frozenset(vars(nn.Module())) | {"forward"}
_HOOKS = [name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict]
_OWN_OF_LIGHTNING = _OWN | frozenset(vars(LightningModule()))


def _contents(value: Any, clones: Mapping[int, Any]) -> Iterator[tuple[Any, Any]]:
    """The tensors, arrays and collections that a value consists of, each with what it holds."""
    waiting, seen = [value], set()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (Tensor, np.ndarray)):
            yield each, clones.get(id(each), each)
        elif is_collection(each) and isinstance(each, (list, set, deque, MutableMapping)):
            yield each, copy.copy(each)
        if is_collection(each) and not is_long(each):
            waiting.extend(entries(each).values())


def _holds(holder: Any, content: Any) -> bool:
    """Whether a tensor, an array or a collection holds what it held."""
    if isinstance(holder, (Tensor, np.ndarray)):
        return same(holder, content)
    if len(holder) != len(content):
        return False
    if isinstance(holder, set):
        return bool(holder == content)
    if isinstance(holder, Mapping):
        return list(holder) == list(content) and all(
            holder[key] is each for key, each in content.items()
        )
    return all(here is there for here, there in zip(holder, content, strict=True))
