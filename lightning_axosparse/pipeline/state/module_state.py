"""Captures the state of a module before a step, restores it, and lists the changed attributes."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.crossing.placeholder import MODULE_ATTRIBUTES
from lightning_axosparse.pipeline.state.values import (
    GENERATORS,
    MISSING,
    MUTABLE,
    PathStep,
    cached_by_class,
    content_of,
    entries,
    has_attributes,
    is_readable,
    of_library,
    overwrite,
    same,
    written_tensors,
)
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    storage_id,
    version_of,
)

OF_LIBRARIES = MODULE_ATTRIBUTES | frozenset(vars(LightningModule()))
"""Names of attributes of modules that torch and Lightning use themselves."""
_HOOKS = [name for name, value in vars(nn.Module()).items() if type(value) is OrderedDict]
_COUNTS = (int, float, complex, Tensor, np.ndarray, np.generic)
"""Types of values that, but for bools, never record that a step has prepared something."""

_VERSION, _IS_WRITTEN = operator.attrgetter("_version"), operator.attrgetter("is_written")

How = Literal["replaced", "changed", "extended"]
"""Whether an attribute has another object, the same object was changed, or a list was extended."""


class AttributePath(NamedTuple):
    """The path to an attribute of the module, of a submodule, or of an object in an attribute.

    Attributes:
        owner: the path from the module to the object that has the attribute.
        name: name of the attribute.
    """

    owner: tuple[PathStep, ...]
    name: str

    @property
    def place(self) -> tuple[PathStep, ...]:
        """The path to the value of the attribute."""
        return (*self.owner, (".", self.name))

    def is_below(self, places: Collection[tuple[PathStep, ...]]) -> bool:
        """Whether the owner is at one of these places, or inside the value there."""
        return any(self.owner[:count] in places for count in range(1, len(self.owner) + 1))

    def __str__(self) -> str:
        """The path as a user would write it: ``self.meters['loss'].total``."""
        text = "self"
        for kind, key in (*self.owner, (".", self.name)):
            is_attribute = kind == "." and not key.isdecimal()
            text += f".{key}" if is_attribute else f"[{key if kind == '.' else repr(key)}]"
        return text


def _namespaces(owner: Any) -> list[Any]:
    """Return the dicts in which an object stores its attributes."""
    if isinstance(owner, nn.Module):
        return [owner._modules, owner._parameters, owner._buffers, vars(owner)]
    return [vars(owner)]


def namespace_of(owner: Any, name: str) -> dict[str, Any]:
    """Return the dict in which an object stores an attribute, or would store a new one."""
    return next((each for each in _namespaces(owner) if name in each), vars(owner))


def attribute_value(owner: Any, name: str) -> Any:
    """Return the value of an attribute, or of the class's; ``MISSING`` if neither exists."""
    namespace = namespace_of(owner, name)
    return namespace[name] if name in namespace else getattr(type(owner), name, MISSING)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, or with ``MISSING`` delete it."""
    assign(namespace_of(owner, name), name, value)


def assign(namespace: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a dict, or with ``MISSING`` delete it."""
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def owner_of(module: nn.Module, path: AttributePath) -> Any:
    """Return the object that has the attribute of a path; None if it no longer exists."""
    owner: Any = module
    try:
        for kind, key in path.owner:
            owner = attribute_value(owner, key) if kind == "." else owner[key]
        vars(owner)
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return None if owner is MISSING else owner


def value_at(module: nn.Module, path: AttributePath) -> Any:
    """Return the value of the attribute of a path; ``MISSING`` if it no longer exists."""
    owner = owner_of(module, path)
    return MISSING if owner is None else attribute_value(owner, path.name)


def write(module: nn.Module, path: AttributePath, how: How, value: Any) -> None:
    """Apply the change that a step has made to an attribute on another rank."""
    owner = owner_of(module, path)
    if owner is None:
        return
    now = attribute_value(owner, path.name)
    is_new = how == "replaced" and not isinstance(now, nn.Parameter)  # An optimizer has it.
    if how == "extended" and isinstance(now, (list, deque)):
        now.extend(value)
    elif is_new or not overwrite(now, value):
        set_attribute(owner, path.name, value)


def _attributes(owner: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, and of its class, that a step may change."""
    classes = [vars(kind) for kind in reversed(type(owner).__mro__) if not of_library(kind)]
    attributes: dict[str, Any] = {}
    for each in (*classes, *_namespaces(owner)):
        attributes.update(each)
    ignored = _ignored(owner)
    return [(n, value) for n, value in attributes.items() if n[:2] != "__" and n not in ignored]


def _ignored(owner: Any) -> Collection[str]:
    """Return the names of attributes that torch and Lightning use themselves."""
    return OF_LIBRARIES if isinstance(owner, nn.Module) else ()


@cached_by_class
def _role(kind: type) -> Literal["owner", "mutable", "tuple", "metric", "none"]:
    """Return how objects of a class are part of a module's state.

    An owner has attributes; a metric looks after its own state.
    """
    if has_attributes(kind) or issubclass(kind, nn.Module):
        return "metric" if issubclass(kind, (Metric, MetricCollection)) else "owner"
    if issubclass(kind, MUTABLE):
        return "mutable"
    return "tuple" if issubclass(kind, tuple) else "none"


_Place = tuple[PathStep, ...]
_Attribute = tuple[_Place, Any, str]
"""The path to an owner, the owner, and the name of its attribute."""
_Reached = tuple[_Place, _Attribute, Any]
"""An object with its own path, and the attribute in which it is."""


@dataclass(slots=True)
class _Holder:
    """An object that can be changed in place, with a copy of its content.

    Attributes:
        path: the path from the module to the owner.
        owner: the module or object in whose attribute it is.
        name: name of that attribute; None for a dict in which the owner stores its attributes.
        value: a dict, list, deque, set, tensor, array or random generator.
        content: the copy; of a parameter only once something writes to it.
        version: of a tensor, autograd's version and the address of its memory.
        memory: of a tensor, another tensor with the same memory.
        is_written: whether an operator has written to a tensor since, also by ``x.data``, which
            does not change the version.
    """

    path: tuple[PathStep, ...]
    owner: Any
    name: str | None
    value: Any
    content: Any = None
    version: tuple[int, int] = (0, 0)
    memory: Any = None
    is_written: bool = False
    place: _Place = ()
    """The path of the value itself."""

    def capture(self) -> None:
        """Copy the present content."""
        value = self.value
        if isinstance(value, Tensor):
            self.version, self.memory = (version_of(value), value.data_ptr()), value.detach()
            self.is_written = False
        self.content = None if isinstance(value, nn.Parameter) else content_of(value)

    def begin_write(self) -> None:
        """Copy the content before an operator writes to a tensor, unless it has changed since.

        Hooks may have written to it by ``x.data``, which no version shows.
        """
        is_as_captured = (version_of(self.value), self.value.data_ptr()) == self.version
        if self.content is None or (is_as_captured and not self.is_written):
            self.content = content_of(self.value)
        self.is_written = True

    def restore(self, prepares: bool) -> None:
        """Restore the content.

        If the step ``prepares`` something once, such as hooks, restore only numbers and tensors of
        a namespace, as other attributes may record that.
        """
        if prepares and self.name is None:
            for name, before in self.content.items():
                now = self.value.get(name, MISSING)
                if isinstance(now, _COUNTS) and not isinstance(now, bool) and before is not None:
                    self.value[name] = before
            return
        if isinstance(self.value, Tensor) and self.value.data_ptr() != self.version[1]:
            self.value.data = self.memory  # Its memory was replaced by another tensor's.
        if self.content is not None:
            overwrite(self.value, self.content)
        self.capture()

    def is_extended(self) -> bool:
        """Whether a list or deque has the same items as before, and more behind them."""
        is_longer = len(self.value) > len(self.content)
        return is_longer and all(map(operator.is_, self.value, self.content))

    def new_items(self) -> list[_Reached] | None:
        """Return what a changed value has got; None if it may refer to other objects elsewhere."""
        if isinstance(self.value, dict):
            if self.value.keys() != self.content.keys():
                return None
            pairs = zip(self.content.values(), self.value.values(), strict=True)
            others = (each for pair in pairs if pair[0] is not pair[1] for each in pair)
            return [] if all(_role(type(each)) == "none" for each in others) else None
        if isinstance(self.value, Tensor) and self.value.data_ptr() != self.version[1]:
            return None  # Writes to its new memory have to be seen.
        if not isinstance(self.value, (list, deque)):
            return []
        items = entries(self.value)
        if items is None or not self.is_extended():
            return None
        attribute = self.path, self.owner, str(self.name)
        count = range(len(self.content), len(items))
        return [((*self.place, ("[]", n)), attribute, items[n]) for n in count]

    def changes(self) -> Iterator[tuple[str, How, Any]]:
        """Yield the changed attributes with their values, or of an extended list the new items."""
        if self.name is None:
            ignored = _ignored(self.owner)
            for name in {**self.content, **self.value}:
                before, now = self.content.get(name, MISSING), self.value.get(name, MISSING)
                if not (name in ignored or same(before, now)):
                    yield name, "replaced", attribute_value(self.owner, name)
            return
        value = attribute_value(self.owner, self.name)
        if value is self.value and isinstance(value, (list, deque)) and self.is_extended():
            yield self.name, "extended", list(value)[len(self.content) :]
        else:
            yield self.name, "changed", value


class _Writes(PausableOperatorMode):
    """Marks tensors to which operators write, and copies parameters before."""

    def __init__(
        self, storages: Mapping[int, Sequence[_Holder]], written: list[AttributePath]
    ) -> None:
        super().__init__()
        self._storages, self._written = storages, written

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for tensor in written_tensors(func, args, kwargs):
            if is_readable(tensor):
                for each in self._storages.get(storage_id(tensor.untyped_storage()), ()):
                    each.begin_write()
                    assert each.name is not None  # Only a namespace has none.
                    self._written.append(AttributePath(each.path, each.name))
        return func(*args, **kwargs)


class ModuleState:
    """A copy of all values on a module that a step may change.

    The states of torchmetrics objects (see ``strategy.compat.metrics``) and tensors without values
    are not captured. Attributes of torch and Lightning themselves are restored,
    but are not listed as changes.

    Args:
        module: the user's module.
        without: ids of objects that are not captured, nor any that are reached only by them.
        layers: names of the submodules whose state is captured; by default the module itself.

    Attributes:
        storages: the captured tensors, by the numbers of their storages.
        written: the tensors to which operators have written since the last capture, each as often
            as it was written to.
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
        self._has_met_metrics = False
        self.written: list[AttributePath] = []
        self._count_hooks()
        self._capture_all()

    def _capture_all(self) -> None:
        self._seen = set(self._without)
        self._holders: list[_Holder] = []
        """Those of all other values than tensors."""
        self._of_tensors: list[_Holder] = []
        self.storages: dict[int, list[_Holder]] = {}
        self._capture(
            [
                (tuple((".", part) for part in name.split(".") if part), ((), None, ""), root)
                for name, root in self._roots.items()
            ]
        )

    def _capture(self, new: list[_Reached]) -> None:
        """Add what can be reached from these objects."""
        for each in self._reachable(new):
            each.capture()
            if isinstance(each.value, Tensor):
                self._of_tensors.append(each)
                number = storage_id(each.value.untyped_storage())
                self.storages.setdefault(number, []).append(each)
            else:
                self._holders.append(each)
        self._tensors = [each.value for each in self._of_tensors]
        self._versioned = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = list(map(_VERSION, self._versioned))
        self._addresses = list(map(Tensor.data_ptr, self._tensors))

    @property
    def reached(self) -> Collection[int]:
        """Ids of all objects that were visited."""
        return self._seen - self._without

    def writes(self) -> PausableOperatorMode:
        """Return the mode that has to be active while tensors are written to."""
        return _Writes(self.storages, self.written)

    def note_write(self, path: AttributePath) -> None:
        """Note that the tensor at a path may have another value, with the same version."""
        value = value_at(self._module, path)
        if isinstance(value, Tensor) and is_readable(value):
            for each in self.storages.get(storage_id(value.untyped_storage()), ()):
                each.is_written = True

    def capture(self) -> bool:
        """Replace the copy by one of the present state.

        Returns:
            Whether it may have other metrics than before.
        """
        self._has_met_metrics = False
        changed = self._changed()
        self.written.clear()
        self._count_hooks()
        new = [each.new_items() for each in changed]
        if None in new:
            self._capture_all()
            return self._has_met_metrics
        for each in changed:
            each.capture()
        if changed:
            self._capture([item for items in reversed(new) for item in reversed(items or ())])
        return self._has_met_metrics

    def rewind(self) -> bool:
        """Restore the state, in the same objects; return whether anything had changed.

        A step that registers hooks does so once, and records it on the module: both stay.
        """
        changed = self._changed()
        if not changed:
            return False
        prepares = self._count_hooks()
        for each in changed:
            each.restore(prepares)
        self._note_versions()
        if prepares:
            self.capture()
        return True

    def changes(self) -> dict[AttributePath, tuple[How, Any]]:
        """Return the changed attributes with their values, or of an extended list the new items."""
        changes: dict[AttributePath, tuple[How, Any]] = {}
        for each in self._changed():
            for name, how, value in each.changes():
                path = AttributePath(each.path, name)
                if path in changes and changes[path][0] == "extended":  # Its items changed, too.
                    changes[path] = "changed", attribute_value(each.owner, name)
                else:
                    changes.setdefault(path, (how, value))
        return changes

    def _changed(self) -> list[_Holder]:
        """Return the holders whose content has changed; it runs in every pass and calls little."""
        changed = []
        tensors = self._of_tensors if self._tensors_changed() else ()
        for each in chain(self._holders, tensors):
            value, content = each.value, each.content
            if isinstance(value, dict):
                alike = len(value) == len(content) and all(map(operator.is_, value, content))
                alike = alike and all(map(operator.is_, value.values(), content.values()))
            elif isinstance(value, (list, deque)):
                alike = len(value) == len(content) and all(map(operator.is_, value, content))
            elif isinstance(value, Tensor):
                alike = (version_of(value), value.data_ptr()) == each.version
                alike = alike and not each.is_written
            elif isinstance(value, GENERATORS):
                alike = same(content_of(value), content)
            else:
                alike = same(value, content)
            if not alike:
                changed.append(each)
        return changed

    def _tensors_changed(self) -> bool:
        """Whether tensors may have changed; there may be thousands, in the user's lists."""
        return (
            any(map(_IS_WRITTEN, self._of_tensors))
            or list(map(Tensor.data_ptr, self._tensors)) != self._addresses
            or list(map(_VERSION, self._versioned)) != self._versions
        )

    def _count_hooks(self) -> bool:
        """Count the hooks of modules; return whether their number has changed."""
        if self._handles == RemovableHandle.next_id:  # No hook was registered in this process.
            return False
        before, self._handles = self._hooks, RemovableHandle.next_id
        self._hooks = sum(
            len(vars(part).get(name) or ()) for part in self._module.modules() for name in _HOOKS
        )
        return self._hooks != before

    def _reachable(self, waiting: list[_Reached]) -> Iterator[_Holder]:
        """Yield all objects that can be changed in place, each by the first path to it."""
        seen = self._seen
        while waiting:
            path, attribute, value = waiting.pop()
            kind: type = type(value)
            role = _role(kind)
            self._has_met_metrics |= role == "metric"
            if role in ("metric", "none") or id(value) in seen:
                continue
            if role == "owner":
                for namespace in _namespaces(value):
                    yield _Holder(path, value, None, namespace)
                held = [((".", name), (path, value, name), e) for name, e in _attributes(value)]
            else:
                is_void = isinstance(value, Tensor) and not is_readable(value)
                if role == "mutable" and not is_void:
                    yield _Holder(*attribute, value, place=path)
                held = [(("[]", key), attribute, e) for key, e in (entries(value) or {}).items()]
            seen.add(id(value))
            waiting += [
                ((*path, step), attribute, each) for step, attribute, each in reversed(held)
            ]
