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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from lightning_axosparse.pipeline.hook import PLAIN, call_hook, nodes

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset(PLAIN)
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
    """A tensor, a list or a dict that a layer has set as an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any


class Appended(NamedTuple):
    """What a layer has appended to a list that is an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any


Emission = HookCall | LayerOutput | Attribute | Appended


class Activation(NamedTuple):
    """What a stage sends to the next: its last layer's output, and emissions of all layers so far.

    Gradients come back for its tensors, in their order. ``fingerprint`` is that of the batch.
    """

    output: Any
    emissions: tuple[Emission, ...] = ()
    fingerprint: int = 0


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
            f"A forward hook of {self.owner!r}, or code that reads its attributes, wants an "
            f"object of type {self.kind!r} from an earlier stage. Between stages tensors travel, "
            "in tuples, lists, dicts and classes that torch.utils._pytree knows: use those, or "
            "put the layer into the last stage (balance=...)."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refuse()

    def __getitem__(self, key: Any) -> Any:
        raise self._refuse()


class _State(NamedTuple):
    """An attribute at one time: a tensor and its version, or a list or dict and its items."""

    value: Tensor | list[Any] | dict[Any, Any]
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
        # A scripted module has neither hooks inside nor attributes that Python sees change.
        self.paths = {
            module: path
            for path, module in self.modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self.compiled = hasattr(layer, "_orig_mod") or layer._compiled_call_impl is not None
        self._namespaces = [
            names for module in self.paths for names in (vars(module), module._buffers)
        ]
        self._entries = 0
        self._places: list[tuple[nn.Module, dict[str, Any], str]] = []

    def hooked(self) -> list[nn.Module]:
        """The modules that have forward hooks."""
        return [m for m in self.paths if m._forward_hooks or m._forward_pre_hooks]

    def attributes(self) -> dict[tuple[nn.Module, str], _State]:
        """What each attribute that is a tensor, a list or a dict is now."""
        # A layer is asked twice a micro-batch, so names are looked for only when there are new.
        entries = sum(map(len, self._namespaces))
        if entries != self._entries:
            self._entries, self._places = entries, list(self._find())
        found: dict[tuple[nn.Module, str], _State] = {}
        for module, values, name in self._places:
            value: Any = values.get(name)
            # The class, as isinstance asks a config of transformers, which is slow, for its own.
            kind = type(value)
            if kind in _PLAIN:
                continue
            if issubclass(kind, Tensor):
                # Running statistics change in place, for the layer alone.
                running = values is module._buffers or value.is_inference()
                found[module, name] = _State(value, (), 0 if running else value._version)
            elif issubclass(kind, (list, dict)):
                items = value.values() if issubclass(kind, dict) else value
                found[module, name] = _State(value, tuple(items), 0)
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
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            warnings.warn(
                "Forward hooks of all modules (register_module_forward_hook) cannot be followed "
                "from stage to stage: later stages do not see what they collect of earlier "
                "layers. Register hooks on modules instead, if the loss depends on them.",
                stacklevel=2,
            )
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
            else:
                self._replay_attribute(module, emission)

    def _replay_attribute(self, module: nn.Module, emission: Attribute | Appended) -> None:
        places = self.layers[emission.layer].name, emission.module, emission.name
        stand_ins = self.withheld.setdefault(".".join(filter(None, places)), [])
        value, now = _fill(emission.value, stand_ins), getattr(module, emission.name, None)
        if isinstance(emission, Appended) and isinstance(now, list):
            now.extend(value)
            self._note_list(now, value)
        elif isinstance(value, dict) and isinstance(now, dict):
            now.update(value)
        else:
            setattr(module, emission.name, value)

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
            result, read = call_hook(hook, module, given)
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
            leaves = {id(n) for n in nodes(output) if isinstance(n, Tensor)}
            known = read & leaves
            # Another hook of the layer has put something else in the place of its output.
            if index == layer and read - leaves - {id(n) for n in nodes(given[0])}:
                known = leaves
            if known:
                self._read.setdefault(index, (output, set()))[1].update(known)

    # What is compiled of a compiled layer is its own forward.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note_attributes(
        self, index: int, before: Mapping[tuple[nn.Module, str], _State], output: Any
    ) -> None:
        layer = self.layers[index]
        for (module, name), now in layer.attributes().items():
            old, place = before.get((module, name)), (index, layer.paths[module], name)
            known = len(old.items) if old is not None and old.begins(now) else None
            if known == len(now.items):
                continue
            if known is not None and isinstance(now.value, list):
                items = list(now.items[known:])
                self._own.append(Appended(*place, _worth(items, output, layer.name)))
                self._note_list(now.value, items)
            elif any(isinstance(item, Tensor) for item in (now.value, *now.items)):
                self._own.append(Attribute(*place, _worth(now.value, output, layer.name)))

    def _note_list(self, items: list[Any], new: Sequence[Any]) -> None:
        # A list of what no gradient reaches may be the layer's memory, which it reads itself.
        graph = any(isinstance(item, Tensor) and item.requires_grad for item in new)
        if graph or not torch.is_grad_enabled():
            self._lists.append((items, len(items) - len(new)))


def _fill(tree: Any, stand_ins: list[Tensor]) -> Any:
    """Put stand-ins in the places of tensors that did not travel, and note them."""

    def stand_in(absent: _Absent) -> Tensor:
        stand_ins.append(absent.stand_in())
        return stand_ins[-1]

    return pytree.tree_map_only(_Absent, stand_in, tree)


def _portable(tree: Any, read: set[int], owner: str) -> Any:
    """A pytree as it travels: with the tensors, by ``id``, that were read."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if id(value) in read else _absent(value)
        return value if isinstance(value, PLAIN) else _Opaque(type(value).__name__, owner)

    return pytree.tree_map(leaf, tree)


def _worth(attribute: Any, output: Any, owner: str) -> Any:
    """An attribute as it travels, though perhaps nobody reads it: up to the output's size."""
    leaves = pytree.tree_leaves(output)
    largest = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    tensors = [node for node in nodes(attribute) if isinstance(node, Tensor)]
    small = {id(t) for t in tensors if t.nbytes <= largest or not t.is_floating_point()}
    return _portable(attribute, small, owner)


def _absent(tensor: Tensor) -> _Absent:
    return _Absent(tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad)
