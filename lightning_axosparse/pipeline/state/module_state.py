"""Captures what a step may change on a module, puts it back, and says what has changed."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.crossing.placeholder import OF_EVERY_MODULE
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.state.values import (
    COLLECTIONS,
    GENERATORS,
    MISSING,
    MUTABLE,
    Step,
    content_of,
    entries,
    has_attributes,
    is_readable,
    of_library,
    overwrite,
    same,
)
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    mutated_arguments,
    storage_id,
    version_of,
)

_OWN = OF_EVERY_MODULE | frozenset(vars(LightningModule()))
_HOOKS = [name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict]
_COUNTS = (int, float, complex, Tensor, np.ndarray, np.generic)
"""Types of what is never a note that a step has prepared something once, unless it is a bool."""

How = Literal["replaced", "changed", "extended"]
"""Whether an attribute got another object, or the same object was changed, or a list has grown."""


class AttributePath(NamedTuple):
    """Where an attribute is: of the module, of a part of it, or of an object that it holds.

    Attributes:
        owner: the way from the module to what has the attribute.
        name: of the attribute.
    """

    owner: tuple[Step, ...]
    name: str

    def __str__(self) -> str:
        """What a user would write: ``self.meters['loss'].total``."""
        text = "self"
        for kind, key in (*self.owner, (".", self.name)):
            is_attribute = kind == "." and not key.isdecimal()
            text += f".{key}" if is_attribute else f"[{key if kind == '.' else repr(key)}]"
        return text


def _namespaces(owner: Any) -> list[Any]:
    """The dicts in which an object has its attributes."""
    if isinstance(owner, nn.Module):
        return [owner._modules, owner._parameters, owner._buffers, vars(owner)]
    return [vars(owner)]


def namespace_of(owner: Any, name: str) -> dict[str, Any]:
    """The dict that holds the value of an attribute, or would hold it."""
    return next((each for each in _namespaces(owner) if name in each), vars(owner))


def held_by(owner: Any, name: str) -> Any:
    """What an attribute holds, or the class in its place; ``MISSING`` if there is nothing."""
    namespace = namespace_of(owner, name)
    return namespace[name] if name in namespace else getattr(type(owner), name, MISSING)


def hold(owner: Any, name: str, value: Any) -> None:
    """Let an attribute hold a value, or with ``MISSING`` be deleted."""
    namespace = namespace_of(owner, name)
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def owner_of(module: nn.Module, place: AttributePath) -> Any:
    """What has the attribute of a place; None if it is gone."""
    owner: Any = module
    try:
        for kind, key in place.owner:
            owner = held_by(owner, key) if kind == "." else owner[key]
        vars(owner)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return None if owner is MISSING else owner


def value_at(module: nn.Module, place: AttributePath) -> Any:
    """What the attribute of a place holds; ``MISSING`` if it is gone."""
    owner = owner_of(module, place)
    return MISSING if owner is None else held_by(owner, place.name)


def write(module: nn.Module, place: AttributePath, how: How, value: Any) -> None:
    """Change an attribute as a step has changed it on another rank."""
    owner = owner_of(module, place)
    if owner is None:
        return
    now = held_by(owner, place.name)
    is_new = how == "replaced" and not isinstance(now, nn.Parameter)  # An optimizer has it.
    if how == "extended" and isinstance(now, (list, deque)):
        now.extend(value)
    elif is_new or not overwrite(now, value):
        hold(owner, place.name, value)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """The attributes of an object, or of its class in their place, that a step may change."""
    classes = [vars(kind) for kind in reversed(type(owner).__mro__) if not of_library(kind)]
    found: dict[str, Any] = {}
    for each in (*classes, *_namespaces(owner)):
        found.update(each)
    own = _own(owner)
    return [(n, value) for n, value in found.items() if n[:2] != "__" and n not in own]


def _own(owner: Any) -> Collection[str]:
    """The attributes in which torch and Lightning keep what belongs to no step."""
    return _OWN if isinstance(owner, nn.Module) else ()


@dataclass(slots=True)
class _Holder:
    """What can be changed in place.

    Attributes:
        path: the way from the module to the owner.
        owner: the module or object that has the attribute to which it belongs.
        name: of that attribute; None for a dict in which the owner keeps its attributes.
        value: a dict, list, deque, set, tensor, array or random generator.
        content: what it held; of a parameter only once something writes to it.
        version: of a tensor, with the address of its memory.
        memory: of a tensor, under another name.
        is_written: whether an operator has written to a tensor since, by ``x.data``, too, which
            makes no new version.
    """

    path: tuple[Step, ...]
    owner: Any
    name: str | None
    value: Any
    content: Any = None
    version: tuple[int, int] = (0, 0)
    memory: Any = None
    is_written: bool = False

    def note(self) -> None:
        """Take the present content for the one to go back to."""
        value = self.value
        if isinstance(value, Tensor):
            self.version, self.memory = (version_of(value), value.data_ptr()), value.detach()
            self.is_written = False
        self.content = None if isinstance(value, nn.Parameter) else content_of(value)

    def put_back(self, prepares: bool) -> None:
        """Give it what it held, but for notes that a step has prepared something, if it does."""
        if prepares and self.name is None:
            for name, before in self.content.items():
                now = self.value.get(name, MISSING)
                if isinstance(now, _COUNTS) and not isinstance(now, bool) and before is not None:
                    self.value[name] = before
            return
        if isinstance(self.value, Tensor) and self.value.data_ptr() != self.version[1]:
            self.value.data = self.memory  # It has got another tensor's.
        if self.content is not None:
            overwrite(self.value, self.content)
        self.note()

    def changes(self) -> Iterator[tuple[str, How, Any]]:
        """The attributes that hold something else than before, and that; of a list what is new."""
        if self.name is None:
            own = _own(self.owner)
            for name in {**self.content, **self.value}:
                before, now = self.content.get(name, MISSING), self.value.get(name, MISSING)
                if not (name in own or same(before, now)):
                    yield name, "replaced", held_by(self.owner, name)
            return
        value = held_by(self.owner, self.name)
        if value is self.value and isinstance(value, (list, deque)):
            before = len(self.content)
            if len(value) > before and all(map(operator.is_, value, self.content)):
                yield self.name, "extended", list(value)[before:]
                return
        yield self.name, "changed", value


class _Writes(PausableOperatorMode):
    """Notes which tensors operators write to, and copies parameters before."""

    def __init__(self, storages: Mapping[int, Sequence[_Holder]]) -> None:
        super().__init__()
        self._storages = storages

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for leaf in mutated_arguments(func, args, kwargs):
            if isinstance(leaf, Tensor) and is_readable(leaf):
                for each in self._storages.get(storage_id(leaf.untyped_storage()), ()):
                    each.is_written = True
                    if each.content is None:
                        each.content = content_of(each.value)
        return func(*args, **kwargs)


class ModuleState:
    """The values of all that a step may change on a module, as they were when last noted.

    Left out are the states of torchmetrics objects, which have their own way, and tensors without
    values. What torch and Lightning keep in a module, and the running statistics of BatchNorms, are
    put back, but are not named as changes.

    Args:
        module: the user's module.
        without: what is left out, by ``id``, with all that is reached by it alone.
        layers: names of those of which the state is captured; by default that of the module.

    Attributes:
        reached: all that was looked at, by ``id``.
        storages: the tensors among what is captured, by the numbers of their storages.
    """

    def __init__(
        self,
        module: nn.Module,
        without: Collection[int] = (),
        layers: Sequence[str] = ("",),
    ) -> None:
        self._module = module
        self._roots = {name: module.get_submodule(name) for name in layers}
        own = {id(part) for root in self._roots.values() for part in root.modules()}
        self._without = {*without, *(id(part) for part in module.modules())} - (own - {*without})
        self._handles, self._hooks = -1, 0
        self._count_hooks()
        self._find()

    def _find(self) -> None:
        seen = set(self._without)
        self._holders = list(self._reachable(seen))
        self.reached: Collection[int] = seen - self._without
        self.storages: dict[int, list[_Holder]] = {}
        for each in self._holders:
            each.note()
            if isinstance(each.value, Tensor):
                number = storage_id(each.value.untyped_storage())
                self.storages.setdefault(number, []).append(each)

    def writes(self) -> PausableOperatorMode:
        """A mode that has to be active where tensors are written to."""
        return _Writes(self.storages)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among what is captured."""
        return [each.value for each in self._holders if isinstance(each.value, Tensor)]

    def note(self) -> None:
        """Take the present state for the one to go back to."""
        changed = self._changed()
        self._count_hooks()
        if any(isinstance(each.value, COLLECTIONS) for each in changed):
            self._find()  # There may be other objects.
        else:
            for each in changed:
                each.note()

    def rewind(self) -> bool:
        """Put back what was captured, into the same objects; return whether something had changed.

        A step that registers hooks does so once, and notes it on the module: both stay.
        """
        changed = self._changed()
        if not changed:
            return False
        prepares = self._count_hooks()
        for each in changed:
            each.put_back(prepares)
        if prepares:
            self.note()
        return True

    def changes(self) -> dict[AttributePath, tuple[How, Any]]:
        """What has changed, and what it is now; of a list that was extended what is new."""
        found: dict[AttributePath, tuple[How, Any]] = {}
        for each in self._changed():
            for name, how, value in each.changes():
                place = AttributePath(each.path, name)
                if place in found and found[place][0] == "extended":  # Its items changed, too.
                    found[place] = "changed", held_by(each.owner, name)
                elif not (isinstance(each.owner, Norm) and name in each.owner._buffers):
                    found.setdefault(place, (how, value))
        return found

    def _changed(self) -> list[_Holder]:
        """The holders that hold something else. In every pass, so it calls little."""
        changed = []
        for each in self._holders:
            value, content = each.value, each.content
            if isinstance(value, dict):
                alike = value.keys() == content.keys()
                alike = alike and all(map(operator.is_, value.values(), content.values()))
            elif isinstance(value, (list, deque)):
                alike = len(value) == len(content) and all(map(operator.is_, value, content))
            elif isinstance(value, Tensor):
                alike = (version_of(value), value.data_ptr()) == each.version
                alike = alike and not each.is_written
                if alike and isinstance(each.owner, Norm):  # Its kernels make no new version.
                    alike = each.content is None or same(value, content)
            elif isinstance(value, GENERATORS):
                alike = same(content_of(value), content)
            else:
                alike = same(value, content)
            if not alike:
                changed.append(each)
        return changed

    def _count_hooks(self) -> bool:
        """Count the hooks of modules; return whether there are others than before."""
        if self._handles == RemovableHandle.next_id:  # No hook was registered in this process.
            return False
        before, self._handles = self._hooks, RemovableHandle.next_id
        self._hooks = sum(
            len(vars(part).get(name) or ()) for part in self._module.modules() for name in _HOOKS
        )
        return self._hooks != before

    def _reachable(self, seen: set[int]) -> Iterator[_Holder]:
        """All that can be changed in place; what has several names has the first one."""
        waiting: list[tuple[tuple[Step, ...], tuple[tuple[Step, ...], Any, str], Any]] = [
            (tuple((".", part) for part in name.split(".") if part), ((), None, ""), root)
            for name, root in self._roots.items()
        ]
        while waiting:
            path, attribute, value = waiting.pop()
            if id(value) in seen or isinstance(value, (Metric, MetricCollection)):
                continue
            kind: type = type(value)
            if isinstance(value, nn.Module) or has_attributes(kind):
                for namespace in _namespaces(value):
                    yield _Holder(path, value, None, namespace)
                held = [((".", name), (path, value, name), e) for name, e in _attributes(value)]
            elif isinstance(value, (*MUTABLE, tuple)):
                is_void = isinstance(value, Tensor) and not is_readable(value)
                if isinstance(value, MUTABLE) and not is_void:
                    yield _Holder(*attribute, value)
                held = [(("[]", key), attribute, e) for key, e in (entries(value) or {}).items()]
            else:
                continue
            seen.add(id(value))
            waiting += [((*path, step), place, each) for step, place, each in reversed(held)]
