"""Emission: what layers leave beside their output, and takes part in the message to later stages.

Code behind the container may read what a forward hook has collected (transformers takes router
logits, attentions and hidden states so), or an attribute that a layer has set (``layer.l_aux``).
It runs on the last stage, where layers of earlier stages compute nothing. So the stage that owns a
layer watches its hooks and attributes, what they leave behind travels with the activation, and on
each later stage the same hooks are called, and the same attributes set, where the layer is called.
Gradients return with the activation's. Where there are no hooks and attributes, nothing travels.
"""

from __future__ import annotations

import operator
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class HookCall(NamedTuple):
    """A hook inside a layer that left something behind, and what it was given."""

    layer: int
    module: str
    registry: str
    position: int
    given: Any


class LayerOutput(NamedTuple):
    """A layer's output, of which hooks of layers left something behind."""

    layer: int
    output: Any


class Attribute(NamedTuple):
    """A tensor that a layer has set as an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any


class Appended(NamedTuple):
    """What a layer has appended to a list that is an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    items: Any


Emission = HookCall | LayerOutput | Attribute | Appended


class Activation(NamedTuple):
    """What a stage sends to the next: its last layer's output, and emissions of all layers so far.

    Gradients come back for its tensors, in their order.
    """

    output: Any
    emissions: tuple[Emission, ...] = ()


@dataclass(frozen=True)
class _Absent:
    """Stands for a tensor that does not travel."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    requires_grad: bool

    def stand_in(self) -> Tensor:
        """A tensor that is not a number, lest a use go unnoticed."""
        nothing = torch.nan if self.dtype.is_floating_point else 0
        value = torch.full((), nothing, dtype=self.dtype, device=self.device).expand(self.shape)
        return value.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Opaque:
    """Stands for an object that cannot travel; refuses whatever is asked of it."""

    kind: str
    owner: str

    def _refuse(self) -> MisconfigurationException:
        return MisconfigurationException(
            f"A forward hook of {self.owner!r}, which is computed by an earlier stage, reads an "
            f"object of type {self.kind!r}. Between stages tensors travel, in tuples, lists, "
            "dicts and classes that torch.utils._pytree knows: let the module return those, or "
            "put hook and loss into one stage (balance=...)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refuse()

    def __getitem__(self, key: Any) -> Any:
        raise self._refuse()


class _State(NamedTuple):
    """An attribute at one time: a tensor and its version, or a list and its items."""

    value: Tensor | list[Any]
    items: tuple[Any, ...]
    version: int

    def begins(self, later: _State) -> bool:
        """Whether it is the same object later, with nothing but items appended."""
        return (
            self.value is later.value
            and self.version == later.version
            and len(self.items) <= len(later.items)
            and all(map(operator.is_, self.items, later.items))
        )


class WatchedLayer:
    """A layer's modules, and the tensors among their attributes.

    Args:
        name: the layer's name, for messages.
        layer: the layer.
    """

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.modules = dict(layer.named_modules())
        self.paths = {module: path for path, module in self.modules.items()}
        self.compiled = hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None
        self._entries = 0
        self._places: list[tuple[nn.Module, dict[str, Any], str]] = []

    def hooked(self) -> list[nn.Module]:
        """The modules that have forward hooks."""
        return [m for m in self.paths if m._forward_hooks or m._forward_pre_hooks]

    def attributes(self) -> dict[tuple[nn.Module, str], _State]:
        """What each attribute that is a tensor or a list is now."""
        # A layer is asked twice a micro-batch, so names are looked for only when there are new.
        entries = sum(len(vars(module)) + len(module._buffers) for module in self.paths)
        if entries != self._entries:
            self._entries, self._places = entries, list(self._find())
        found: dict[tuple[nn.Module, str], _State] = {}
        for module, values, name in self._places:
            value = values.get(name)
            if isinstance(value, Tensor):
                # Running statistics change in place, for the layer alone.
                running = values is module._buffers or value.is_inference()
                found[module, name] = _State(value, (), 0 if running else value._version)
            elif isinstance(value, list):
                found[module, name] = _State(value, tuple(value), 0)
        return found

    def _find(self) -> Iterator[tuple[nn.Module, dict[str, Any], str]]:
        for module in self.paths:
            for values, names in (
                (vars(module), vars(module).keys() - _OF_EVERY_MODULE),
                (module._buffers, module._buffers),
            ):
                for name in sorted(names):
                    yield module, values, name


@dataclass
class Emissions:
    """What the layers have emitted in one micro-batch up to one stage.

    Args:
        layers: the layers.
        received: what came from the previous stage.
        withheld: filled, per attribute that does not travel, with stand-ins, which nobody may
            differentiate.
    """

    layers: Sequence[WatchedLayer]
    received: Sequence[Emission]
    withheld: dict[str, list[Tensor]]
    _own: list[Emission] = field(default_factory=list)
    _outputs: dict[int, Any] = field(default_factory=dict)
    """The outputs of the last two layers, if there are hooks."""
    _read: dict[int, tuple[Any, set[int]]] = field(default_factory=dict)
    """Per layer of which hooks keep something: its output, and which tensors of it, by ``id``."""
    _layer: int = -1
    _watching: bool = False
    _hooks: list[tuple[dict[int, Any], int, Any]] = field(default_factory=list)
    _lists: list[tuple[list[Any], int]] = field(default_factory=list)
    """Lists that layers have appended to, and how long they were before."""

    def watch(self, own: range) -> None:
        """Watch from here on what the stage's own layers emit.

        Hooks of the layer before fire once more on this stage, on what was received.
        """
        self._watching = True
        if own.start:
            self._watch_hooks(self.layers[own.start - 1].modules[""], own.start - 1)
        for index in own:
            layer = self.layers[index]
            for module in layer.hooked():
                path = layer.paths[module]
                if path and layer.compiled:
                    warnings.warn(
                        f"{layer.name + '.' + path!r} has forward hooks, but is inside a "
                        "compiled layer, where they cannot be followed: later stages do not see "
                        "what they collect. Compile the parts of the layer that have no hooks.",
                        stacklevel=2,
                    )
                else:
                    self._watch_hooks(module, index if not path else None)

    def compute(self, index: int, compute: Callable[[], Any]) -> Any:
        """Compute a layer of the stage's own."""
        if not self._watching:
            return compute()
        before = self.layers[index].attributes()
        self._layer = index
        output = compute()
        self._note_attributes(index, before, output)
        self.remember(index, output)
        return output

    def remember(self, index: int, output: Any) -> None:
        """Note the output of a layer, about to be given to its hooks."""
        if self._hooks:
            self._outputs = {
                i: o for i, o in {**self._outputs, index: output}.items() if i >= index - 1
            }

    def sent(self) -> tuple[Emission, ...]:
        """What travels on to the next stage."""
        outputs = [
            LayerOutput(index, _portable(output, read, self.layers[index].name))
            for index, (output, read) in self._read.items()
        ]
        return *self.received, *self._own, *outputs

    def end(self) -> None:
        """Watch no longer; empty lists, on stages where no code is left that could do so."""
        for hooks, key, hook in self._hooks:
            if key in hooks:
                hooks[key] = hook
        self._outputs, self._read = {}, {}
        for items, length in reversed(self._lists if self._watching else []):
            del items[length:]

    def replay(self, index: int) -> None:
        """Do what hooks and attributes of a layer of an earlier stage did where it was computed."""
        for emission in self.received:
            if emission.layer != index or isinstance(emission, LayerOutput):
                continue
            module = self.layers[index].modules[emission.module]
            if isinstance(emission, HookCall):
                hooks = list(getattr(module, emission.registry).values())
                if emission.position < len(hooks):
                    hooks[emission.position](module, *_fill(emission.given, []))
            elif isinstance(emission, Appended):
                items = getattr(module, emission.name)
                items.extend(emission.items)
                self._note_list(items, emission.items)
            else:
                places = self.layers[index].name, emission.module, emission.name
                stand_ins = self.withheld.setdefault(".".join(filter(None, places)), [])
                setattr(module, emission.name, _fill(emission.value, stand_ins))

    def output(self, index: int, stand_ins: list[Tensor]) -> Any:
        """The output of a layer of an earlier stage, if its hooks read it, else None.

        Args:
            index: of the layer.
            stand_ins: filled with those for tensors that did not travel.
        """
        for emission in self.received:
            if isinstance(emission, LayerOutput) and emission.layer == index:
                return _fill(emission.output, stand_ins)
        return None

    def _watch_hooks(self, module: nn.Module, layer: int | None) -> None:
        for registry in _REGISTRIES:
            hooks = getattr(module, registry)
            for position, (key, hook) in enumerate(list(hooks.items())):
                if getattr(hook, "watched_by", None) is self:
                    continue
                hooks[key] = self._watched(hook, layer, registry, position)
                self._hooks.append((hooks, key, hook))

    def _watched(
        self, hook: Callable[..., Any], layer: int | None, registry: str, position: int
    ) -> Callable[..., Any]:
        def watched(module: nn.Module, *given: Any) -> Any:
            # Counts and what is counted stand here, so that both counts see the same references.
            nodes = list(_nodes(given))
            before = [sys.getrefcount(node) for node in nodes]
            with _Operators(nodes) as operators:
                result = hook(module, *given)
            after = [sys.getrefcount(node) for node in nodes]
            identities = {id(node) for node in nodes}
            passed_on = Counter(id(node) for node in _nodes(result, identities))
            kept = [
                node
                for node, old, new in zip(nodes, before, after, strict=True)
                if new - passed_on[id(node)] > old
            ]
            read = {id(n) for node in kept for n in _nodes(node) if isinstance(n, Tensor)}
            read |= operators.read(result)
            if read and layer is None:
                self._note_call(module, registry, position, given, read)
            elif read and layer is not None:
                self._note_outputs(layer, given, read)
            return result

        watched.watched_by = self  # type: ignore[attr-defined]
        return watched

    def _note_call(
        self, module: nn.Module, registry: str, position: int, given: Any, read: set[int]
    ) -> None:
        layer = self.layers[self._layer]
        path = layer.paths[module]
        portable = _portable(given, read, f"{layer.name}.{path}")
        self._own.append(HookCall(self._layer, path, registry, position, portable))

    def _note_outputs(self, layer: int, given: tuple[Any, ...], read: set[int]) -> None:
        for index in (layer - 1, layer):
            if index not in self._outputs:
                continue
            output = self._outputs[index]
            leaves = {id(n) for n in _nodes(output) if isinstance(n, Tensor)}
            known = read & leaves
            # Another hook of the layer has put something else in the place of its output.
            if index == layer and read - leaves - {id(n) for n in _nodes(given[0])}:
                known = leaves
            if known:
                self._read.setdefault(index, (output, set()))[1].update(known)

    def _note_attributes(
        self, index: int, before: Mapping[tuple[nn.Module, str], _State], output: Any
    ) -> None:
        layer = self.layers[index]
        for (module, name), now in layer.attributes().items():
            old, place = before.get((module, name)), (index, layer.paths[module], name)
            if old is None or not old.begins(now):
                if isinstance(now.value, Tensor) and not _travels(now.value, output):
                    self._own.append(Attribute(*place, _absent(now.value)))
                elif isinstance(now.value, Tensor) or any(isinstance(i, Tensor) for i in now.items):
                    self._own.append(Attribute(*place, _portable(now.value, None, layer.name)))
            elif isinstance(now.value, list) and (items := now.items[len(old.items) :]):
                self._own.append(Appended(*place, _portable(items, None, layer.name)))
                self._note_list(now.value, items)

    def _note_list(self, items: list[Any], new: Sequence[Any]) -> None:
        # A list of what no gradient reaches may be the layer's memory, which it reads itself.
        graph = any(isinstance(item, Tensor) and item.requires_grad for item in new)
        if graph or not torch.is_grad_enabled():
            self._lists.append((items, len(items) - len(new)))


class _Operators(TorchFunctionMode):
    """Sees which of some tensors a hook computes with, and whether anything is left of it.

    Args:
        given: the tensors, and what they are in.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._given = {id(node) for node in given if isinstance(node, Tensor)}
        self._used: set[int] = set()
        self._made: list[weakref.ref[Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._used |= {id(node) for node in _nodes((args, kwargs))} & self._given
        self._made += [
            weakref.ref(node)
            for node in _nodes(result)
            if isinstance(node, (Tensor, np.ndarray)) and id(node) not in self._given
        ]
        return result

    def read(self, returned: Any) -> set[int]:
        """The tensors, by ``id``, of which more is left than what the hook has returned."""
        passed_on = {id(node) for node in _nodes(returned)}
        left = any(made() is not None and id(made()) not in passed_on for made in self._made)
        return self._used if left else set()


def _fill(tree: Any, stand_ins: list[Tensor]) -> Any:
    """Put stand-ins in the places of tensors that did not travel, and note them."""

    def stand_in(absent: _Absent) -> Tensor:
        stand_ins.append(absent.stand_in())
        return stand_ins[-1]

    return pytree.tree_map_only(_Absent, stand_in, tree)


def _portable(tree: Any, read: set[int] | None, owner: str) -> Any:
    """A pytree as it travels: with the tensors that were read (by ``id``; None for all)."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if read is None or id(value) in read else _absent(value)
        return value if isinstance(value, _PLAIN) else _Opaque(type(value).__name__, owner)

    return pytree.tree_map(leaf, tree)


def _travels(attribute: Tensor, output: Any) -> bool:
    """Whether an attribute travels, though perhaps nobody reads it: up to the output's size."""
    leaves = pytree.tree_leaves(output)
    largest = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    return attribute.nbytes <= largest or not attribute.is_floating_point()


def _absent(tensor: Tensor) -> _Absent:
    return _Absent(tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad)


def _nodes(tree: Any, known: Collection[int] = ()) -> Iterator[Any]:
    """The tensors in any nesting of containers and objects, and whatever they are in.

    Args:
        tree: the nesting.
        known: by ``id``, what is not looked into.
    """
    pending, seen = [tree], set(known)
    while pending:
        node = pending.pop()
        if isinstance(node, (*_PLAIN, nn.Module, type)):
            continue
        yield node
        if isinstance(node, (Tensor, np.ndarray)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple)):
            pending += node
        else:
            pending += getattr(node, "__dict__", {}).values()
