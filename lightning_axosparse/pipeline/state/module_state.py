"""Captures what a step may change on a module: parameters, buffers and attributes."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.batch_layout import Key
from lightning_axosparse.pipeline.crossing.placeholder import OF_EVERY_MODULE
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.state.values import (
    MISSING,
    copied,
    entries,
    holds_same,
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

    @property
    def is_of_hooks(self) -> bool:
        """Whether it is where torch keeps the hooks of a module."""
        return self.name in _HOOKS


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


def held_by(owner: Any, name: str) -> Any:
    """What an attribute holds, or the class in its place; ``MISSING`` if there is nothing."""
    namespace = namespace_of(owner, name)
    return namespace[name] if name in namespace else _inherited(owner).get(name, MISSING)


def value_at(module: nn.Module, place: Place) -> Any:
    """What the attribute of a place holds; ``MISSING`` if it is gone."""
    owner = owner_of(module, place)
    return MISSING if owner is None else held_by(owner, place.name)


def write(module: nn.Module, place: Place, value: Any, in_place: bool = True) -> None:
    """Give an attribute a value.

    Args:
        module: the user's module.
        place: the attribute.
        value: ``MISSING`` to delete it.
        in_place: whether the object that it holds gets the content, where it can take it.
    """
    owner = owner_of(module, place)
    if owner is None:
        return
    held = namespace_of(owner, place.name).get(place.name)
    if not (in_place and overwrite(held, value)):
        hold(owner, place.name, value)


def hold(owner: Any, name: str, value: Any) -> None:
    """Let an attribute hold another value; ``MISSING`` deletes it."""
    namespace = namespace_of(owner, name)
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _inherited(owner: Any) -> dict[str, Any]:
    """The values that a user's class gives attributes of its objects."""
    return {
        name: value
        for kind in reversed(type(owner).__mro__)
        if not of_library(kind)
        for name, value in vars(kind).items()
        if isinstance(value, _INHERITED) and not name.startswith("__")
    }


_INHERITED = (bool, int, float, list, set, dict, deque, Tensor, np.ndarray)
_OWN_OF_LIGHTNING = OF_EVERY_MODULE | frozenset(vars(LightningModule()))
_HOOKS = [name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict]


def _own(owner: Any) -> frozenset[str]:
    """The attributes in which torch and Lightning keep what belongs to no step."""
    if isinstance(owner, LightningModule):
        return _OWN_OF_LIGHTNING
    return OF_EVERY_MODULE if isinstance(owner, nn.Module) else frozenset()


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

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Note the memory that an operator writes to, and run it."""
        for leaf in mutated_arguments(func, args, kwargs):
            if isinstance(leaf, Tensor) and is_readable(leaf):
                storage = storage_id(leaf.untyped_storage())
                if storage not in self.storages:
                    self.storages.add(storage)
                    self._note(storage)
        return func(*args, **kwargs)


class _Attribute(NamedTuple):
    """An attribute of a part of the module, or of an object; without a name all of them."""

    path: tuple[Step, ...]
    owner: Any
    name: str | None


@dataclass
class _Holder:
    """What can be changed in place: a tensor, an array, a collection or the dict of an object.

    Attributes:
        of: the attribute that it belongs to.
        value: the holder.
        content: a copy of what it held; of a parameter that nothing has written to, its memory.
        memory: of a parameter.
    """

    of: _Attribute
    value: Any
    content: Any = field(init=False)
    memory: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if isinstance(self.value, nn.Parameter):
            self.content = self.memory = self.value.detach()
        elif isinstance(self.value, (Tensor, np.ndarray)):
            self.content = copied(self.value)
        else:
            self.content = copy.copy(self.value)

    @property
    def storage(self) -> int | None:
        """The number of a tensor's storage."""
        is_tensor = isinstance(self.value, Tensor)
        return storage_id(self.value.untyped_storage()) if is_tensor else None

    def is_same(self) -> bool:
        """Whether it holds what it held."""
        value, content = self.value, self.content
        if self.memory is not None and self.memory.data_ptr() != value.data_ptr():
            return False  # A teacher, for example, that is still equal to its student.
        if isinstance(value, (Tensor, np.ndarray)):
            return content is self.memory or same(content, value)
        return holds_same(value, content)

    def changed(self) -> Iterator[str]:
        """The names of attributes that are other ones than before."""
        owner, name = self.of.owner, self.of.name
        if name is not None:
            yield name
            return
        default, own = _inherited(owner), _own(owner)
        for name in {**self.content, **self.value}:
            before, now = (
                each.get(name, default.get(name, MISSING)) for each in (self.content, self.value)
            )
            if not (name in own or same(before, now)):
                yield name

    def put_back(self) -> None:
        """Give it what it held."""
        if self.memory is not None and self.memory.data_ptr() != self.value.data_ptr():
            self.value.data = self.memory
        if self.content is not self.memory:
            overwrite(self.value, self.content)


class ModuleState:
    """The values of all that a step may change on a module, at the time when it is created.

    Left out are the states of torchmetrics objects, which have their own way, and tensors without
    values. What torch and Lightning keep in a module, besides hooks, and the running statistics of
    BatchNorms, which follow micro-batches as they do, are put back, but are not named as changes.
    Parameters may fill the memory: they are copied when they are about to change (:meth:`watched`).

    Args:
        module: the user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders = [*_holders(module), *_hooks(module)]
        self._parameters: dict[int | None, list[_Holder]] = {}
        for each in self._holders:
            if each.memory is not None:
                self._parameters.setdefault(each.storage, []).append(each)

    @contextmanager
    def watched(self) -> Iterator[set[Place]]:
        """Copy the parameters that operators in the context are about to change.

        Yields:
            Filled at the end: the tensors that they have written to, even if these are equal.
        """
        written: set[Place] = set()
        with Writes(self._save) as writes:
            yield written
        written |= {
            Place(each.of.path, each.of.name)
            for each in self._holders
            if each.of.name is not None and each.storage in writes.storages
            if not _is_statistic(each.of.owner, each.of.name)
        }

    def _save(self, storage: int) -> None:
        """Copy the parameters that have some memory."""
        for each in self._parameters.get(storage, ()):
            if each.content is each.memory:
                each.content = copied(each.content)

    def rewind(self) -> dict[Place, Any]:
        """Put back what was captured, into the same objects.

        Returns:
            What had changed: copies of the values; ``MISSING`` for an attribute that was deleted.
        """
        changed = [each for each in self._holders if not each.is_same()]
        changes = {
            Place(each.of.path, name): _clone(held_by(each.of.owner, name))
            for each in changed
            for name in each.changed()
            if not _is_statistic(each.of.owner, name)
        }
        for each in changed:
            each.put_back()
        return changes


def _is_statistic(owner: Any, name: str) -> bool:
    """Whether an attribute is a running statistic of a BatchNorm."""
    return isinstance(owner, Norm) and name in owner._buffers


def _clone(value: Any) -> Any:
    return copied(value.detach() if isinstance(value, nn.Parameter) else value, objects=True)


def _holders(module: nn.Module) -> Iterator[_Holder]:
    """All that can be changed in place; what has several names has the first one.

    Parts of the module have the one that ``module.named_modules()`` gives them.
    """
    waiting: list[tuple[tuple[Step, ...], _Attribute | None, Any]] = [((), None, module)]
    seen: set[int] = set()
    while waiting:
        path, attribute, value = waiting.pop()
        if isinstance(value, (Tensor, np.ndarray)):
            if attribute and (not isinstance(value, Tensor) or is_readable(value)):
                yield _Holder(attribute, value)
            continue
        if id(value) in seen or isinstance(value, (Metric, MetricCollection)):
            continue
        held: list[tuple[Step, _Attribute | None, Any]] = []
        if isinstance(value, nn.Module) or is_object(value):
            for namespace in _namespaces(value):
                yield _Holder(_Attribute(path, value, None), namespace)
            held = [
                ((".", name), _Attribute(path, value, name), each)
                for name, each in _attributes(value)
            ]
        elif attribute and is_collection(value):
            if isinstance(value, (list, set, deque, MutableMapping)):
                yield _Holder(attribute, value)
            if not is_long(value):
                held = [(_step(key), attribute, each) for key, each in entries(value).items()]
        else:
            continue
        seen.add(id(value))
        waiting.extend(((*path, step), where, each) for step, where, each in reversed(held))


def _hooks(module: nn.Module) -> Iterator[_Holder]:
    """Where the parts of a module keep their hooks."""
    for path, part in module.named_modules():
        steps = tuple((".", name) for name in path.split(".") if name)
        for name in _HOOKS:
            if (hooks := vars(part).get(name)) is not None:
                yield _Holder(_Attribute(steps, part, name), hooks)


def _namespaces(owner: Any) -> Iterator[dict[str, Any]]:
    """The dicts in which an object has its attributes."""
    yield vars(owner)
    if isinstance(owner, nn.Module):
        yield from (owner._parameters, owner._buffers, owner._modules)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that a step may change, or of an object."""
    if isinstance(owner, nn.Module):
        yield from (*owner._modules.items(), *owner._parameters.items(), *owner._buffers.items())
    own = _own(owner)
    for name, value in {**_inherited(owner), **vars(owner)}.items():
        if name not in own:
            yield name, value


def _step(key: Key) -> Step:
    is_attribute = key.text.startswith(".") and isinstance(key.value, str)
    return "." if is_attribute else "[]", key.value
