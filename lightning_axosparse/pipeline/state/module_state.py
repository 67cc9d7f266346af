"""Captures what a step may change on a module, puts it back, and says what has changed."""

from __future__ import annotations

import copy
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric, MetricCollection

from lightning_axosparse.pipeline.batch_layout import Key
from lightning_axosparse.pipeline.crossing.placeholder import OF_EVERY_MODULE
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.state.values import (
    GENERATORS,
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
    state_of,
)
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    mutated_arguments,
    storage_id,
    version_of,
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


def write(module: nn.Module, place: Place, value: Any, is_new: bool = False) -> None:
    """Give an attribute a value, in the object that it holds where that can take it.

    Args:
        module: the user's module.
        place: the attribute.
        value: ``MISSING`` to delete it.
        is_new: whether the object that it holds is others' from now on, unless a parameter.
    """
    owner = owner_of(module, place)
    if owner is None:
        return
    namespace = namespace_of(owner, place.name)
    if value is MISSING:
        namespace.pop(place.name, None)
        return
    now = namespace.get(place.name)
    if (is_new and not isinstance(now, nn.Parameter)) or not overwrite(now, value):
        namespace[place.name] = value


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
_COUNTS = (int, float, complex, Tensor, np.ndarray, np.generic)
"""Types of what is never a note that a step has prepared something once, unless it is a bool."""


def _own(owner: Any) -> frozenset[str]:
    """The attributes in which torch and Lightning keep what belongs to no step."""
    if isinstance(owner, LightningModule):
        return _OWN_OF_LIGHTNING
    return OF_EVERY_MODULE if isinstance(owner, nn.Module) else frozenset()


class _Writes(PausableOperatorMode):
    """Calls a function with the number of each storage that an operator is about to write to."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note = note

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        for leaf in mutated_arguments(func, args, kwargs):
            if isinstance(leaf, Tensor) and is_readable(leaf):
                self._note(storage_id(leaf.untyped_storage()))
        return func(*args, **kwargs)


_SMALL = 1024
"""Entries of tensors that are compared by value: writing to ``x.data`` makes no new version."""


@dataclass(slots=True)
class _Holder:
    """What can be changed in place.

    Attributes:
        path: the way from the module to the owner.
        owner: the module or object that has the attribute to which it belongs.
        name: of that attribute; None for the dict in which the owner keeps its attributes.
        value: a dict, list, deque, set, tensor, array or random generator.
        kind: of value.
        content: a copy of what it held; of a parameter only once something writes to it.
        version: of a tensor, with the address of its memory.
        memory: of a tensor, under another name.
    """

    path: tuple[Step, ...]
    owner: Any
    name: str | None
    value: Any
    kind: Literal["dict", "list", "set", "tensor", "parameter", "array", "generator"]
    content: Any = None
    version: tuple[int, int] = (0, 0)
    memory: Any = None

    def note(self) -> None:
        """Take the present content for the one to go back to."""
        value = self.value
        if isinstance(value, Tensor):
            self.version = version_of(value), value.data_ptr()
            self.memory, self.content = value.detach(), copied(value)
            if self.kind == "parameter":
                self.content = None
        elif self.kind == "generator":
            self.content = state_of(value)
        else:
            self.content = copy.copy(value)

    def put_back(self) -> None:
        """Give it what it held."""
        value = self.value
        if isinstance(value, Tensor) and value.data_ptr() != self.version[1]:
            value.data = self.memory  # It has got another tensor's.
        if self.content is not None:
            overwrite(value, self.content)
        if isinstance(value, Tensor):
            self.version = version_of(value), value.data_ptr()
        if self.kind == "parameter":
            self.content = None  # Nothing has written to it since.

    def names(self) -> Iterator[str]:
        """The attributes that hold something else than before."""
        if self.name is not None:
            yield self.name
            return
        default, own = _inherited(self.owner), _own(self.owner)
        for name in {**self.content, **self.value}:
            before, now = (
                each.get(name, default.get(name, MISSING)) for each in (self.content, self.value)
            )
            if not (name in own or same(before, now)):
                yield name


class ModuleState:
    """The values of all that a step may change on a module, as they were when last noted.

    Left out are the states of torchmetrics objects, which have their own way, and tensors without
    values. What torch and Lightning keep in a module, and the running statistics of BatchNorms, are
    put back, but are not named as changes.

    Args:
        module: the user's module.
        without: what is left out, by ``id``, with all that is reached by it alone.
        layers: names of those of which the state is captured; by default that of the module.
        trained: whether parameters that are trained are captured, too.
    """

    def __init__(
        self,
        module: nn.Module,
        without: Collection[int] = (),
        layers: Sequence[str] | None = None,
        trained: bool = False,
    ) -> None:
        self._module, self._without, self._trained = module, frozenset(without), trained
        self._layers = (
            None if layers is None else {each: module.get_submodule(each) for each in layers}
        )
        self._handles, self._hooks = -1, 0
        self._find()

    def _find(self) -> None:
        self._note_hooks()
        self._reached: set[int] = set()
        self._holders = list(self._reachable(self._reached))
        for each in self._holders:
            each.note()
        self._parameters: dict[int, list[_Holder]] = {}
        for each in self._holders:
            if each.kind == "parameter":
                number = storage_id(each.value.untyped_storage())
                self._parameters.setdefault(number, []).append(each)

    @property
    def reached(self) -> Collection[int]:
        """All that was looked at, by ``id``."""
        return self._reached

    @property
    def has_parameters(self) -> bool:
        """Whether parameters are captured: they are copied when something :meth:`writes`."""
        return bool(self._parameters)

    def writes(self) -> PausableOperatorMode:
        """A mode that copies parameters before operators in it write to them."""
        return _Writes(self._save)

    def _save(self, storage: int) -> None:
        for each in self._parameters.get(storage, ()):
            if each.content is None:
                each.content = each.value.detach().clone()

    def note(self) -> None:
        """Take the present state for the one to go back to."""
        changed = self._changed()
        self._note_hooks()
        if any(each.kind in ("dict", "list", "set") for each in changed):
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
        prepares = self._note_hooks()
        for each in changed:
            if prepares and each.kind == "dict" and each.name is None:
                _put_back_counts(each)
            else:
                each.put_back()
        if prepares:
            self.note()
        return True

    def changes(self) -> dict[Place, Any]:
        """What has changed, and the values; ``MISSING`` for an attribute that was deleted."""
        return {
            Place(each.path, name): held_by(each.owner, name)
            for each in self._changed()
            for name in each.names()
            if not (isinstance(each.owner, Norm) and name in each.owner._buffers)
        }

    def grown(self, place: Place) -> list[Any] | None:
        """The items that were appended to the list that an attribute holds; None of others."""
        for each in self._holders:
            if each.kind == "list" and (each.path, each.name) == place:
                value = value_at(self._module, place)
                before = len(each.content)
                grows = value is each.value and len(value) > before
                if grows and all(map(operator.is_, value, each.content)):
                    return list(value)[before:]
        return None

    def is_new(self, place: Place) -> bool:
        """Whether an attribute holds another object than before."""
        for each in self._holders:
            if each.name is None and each.path == place.owner and place.name in each.content:
                return each.value.get(place.name) is not each.content[place.name]
        return True

    def tensors(self) -> list[Tensor]:
        """The tensors among what is captured."""
        return [each.value for each in self._holders if isinstance(each.value, Tensor)]

    def _changed(self) -> list[_Holder]:
        """The holders that hold something else. In every pass, so it calls little."""
        changed = []
        for each in self._holders:
            value, content, kind = each.value, each.content, each.kind
            if kind == "dict":
                alike = value.keys() == content.keys()
                alike = alike and all(map(operator.is_, value.values(), content.values()))
            elif kind == "list":
                alike = len(value) == len(content) and all(map(operator.is_, value, content))
            elif kind == "set":
                alike = value == content
            elif kind == "array":
                alike = same(value, content)
            elif kind == "generator":
                alike = same(state_of(value), content)
            else:
                alike = (version_of(value), value.data_ptr()) == each.version
                if alike and content is not None and value.numel() <= _SMALL:
                    alike = same(value, content)
                elif alike and kind == "parameter":
                    alike = content is None
            if not alike:
                changed.append(each)
        return changed

    def _note_hooks(self) -> bool:
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
        roots = {"": self._module} if self._layers is None else self._layers
        within = {id(part) for root in roots.values() for part in root.modules()}
        waiting: list[tuple[tuple[Step, ...], tuple[Any, ...] | None, Any]] = [
            (tuple((".", part) for part in name.split(".") if part), None, root)
            for name, root in roots.items()
        ]
        while waiting:
            path, of, value = waiting.pop()
            if id(value) in seen or id(value) in self._without:
                continue
            if isinstance(value, nn.Module) and self._layers and id(value) not in within:
                continue
            if isinstance(value, (Tensor, np.ndarray)):
                seen.add(id(value))
                kind = self._kind(value)
                if of and kind:
                    yield _Holder(of[0], of[1], of[2], value, kind)
                continue
            if isinstance(value, GENERATORS) and of:
                seen.add(id(value))
                yield _Holder(of[0], of[1], of[2], value, "generator")
                continue
            if isinstance(value, (Metric, MetricCollection)):
                continue
            held: list[tuple[Step, tuple[Any, ...], Any]] = []
            if isinstance(value, nn.Module) or is_object(value):
                for namespace in _namespaces(value):
                    yield _Holder(path, value, None, namespace, "dict")
                held = [
                    ((".", name), (path, value, name), each) for name, each in _attributes(value)
                ]
            elif of and is_collection(value):
                if isinstance(value, (list, deque, set, MutableMapping)):
                    yield _Holder(of[0], of[1], of[2], value, _kind_of(value))
                if not is_long(value):
                    held = [(_step(key), of, each) for key, each in entries(value).items()]
            else:
                continue
            seen.add(id(value))
            waiting += [((*path, step), place, each) for step, place, each in reversed(held)]

    def _kind(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return "array"
        if not is_readable(value):
            return None
        if not isinstance(value, nn.Parameter):
            return "tensor"
        return "parameter" if self._trained or not value.requires_grad else None


def _put_back_counts(holder: _Holder) -> None:
    """Put back of an owner's attributes what is not a note that something was prepared."""
    for name, before in holder.content.items():
        now = holder.value.get(name, MISSING)
        if isinstance(now, _COUNTS) and not isinstance(now, bool) and before is not None:
            holder.value[name] = before


def _kind_of(value: Any) -> Any:
    if isinstance(value, (list, deque)):
        return "list"
    return "set" if isinstance(value, set) else "dict"


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
