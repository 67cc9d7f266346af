"""Sends the side outputs of layers to later stages: what forward hooks and attributes hold.

Code behind the layers may read what a forward hook has collected (transformers collects router
logits, attentions and hidden states this way), or an attribute that a layer has set
(``layer.l_aux``). It runs on the last stage, where layers of earlier stages compute nothing. So the
stage of a layer watches its hooks and attributes and sends what they keep with the activation; each
later stage calls the same hooks, and sets the same attributes, where the layer is called. Gradients
return with those of the activation. Without such hooks and attributes nothing is sent.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_axosparse.pipeline.derived_values import Place
from lightning_axosparse.pipeline.forward_hooks import PLAIN, call_hook, nodes
from lightning_axosparse.pipeline.placeholder import Unsent, fill
from lightning_axosparse.support.torch_internals import tree_leaves, tree_map, version_of
from lightning_axosparse.support.troubleshooting import see

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset(PLAIN)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class HookCall(NamedTuple):
    """The arguments of a hook inside a layer that keeps some of them."""

    layer: int
    module: str
    registry: str
    position: int
    given: Any


class LayerOutput(NamedTuple):
    """A layer's output, of which hooks of layers keep something."""

    layer: int
    output: Any


class Attribute(NamedTuple):
    """A tensor, list or dict that a layer has set as an attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any


class Appended(NamedTuple):
    """The items that a layer has appended to a list attribute of one of its modules."""

    layer: int
    module: str
    name: str
    value: Any


SideOutput = HookCall | LayerOutput | Attribute | Appended


class Activation(NamedTuple):
    """What a stage sends to the next.

    Gradients come back for its tensors, in their order.

    Attributes:
        output: of the stage's last layer, with descriptions of the tensors that nothing needs.
        side_outputs: of all layers up to that.
        values: what else the step has computed from outputs of layers and still needs.
        fingerprint: of the batch.
        is_empty: whether the step has ended on the stage, without calling a layer.
    """

    output: Any
    side_outputs: tuple[SideOutput, ...] = ()
    values: tuple[tuple[Place, Tensor], ...] = ()
    fingerprint: int = 0
    is_empty: bool = False


@dataclass(frozen=True)
class _Unsendable:
    """Replaces an object that cannot be sent; any use of it raises an error."""

    kind: str
    owner: str = field(compare=False)

    def _error(self) -> MisconfigurationException:
        return MisconfigurationException(
            f"A forward hook of {self.owner!r}, or code that reads its attributes, wants an "
            f"object of type {self.kind!r} from an earlier stage. Stages send each other tensors, "
            "in tuples, lists, dicts and classes that torch.utils._pytree knows: use those, or "
            "put the layer into the last stage (balance=...)." + see("values-between-layers")
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._error()

    def __getitem__(self, key: Any) -> Any:
        raise self._error()


class _State(NamedTuple):
    """An attribute at one time: a tensor and its version, or a list or dict and its items."""

    value: Tensor | list[Any] | dict[Any, Any]
    items: tuple[Any, ...]
    version: int

    def begins(self, later: _State) -> bool:
        """Whether ``later`` is the same object with nothing but items appended."""
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
        # Called twice for each micro-batch and layer, so names are listed only if there are new.
        entries = sum(map(len, self._namespaces))
        if entries != self._entries:
            self._entries, self._places = entries, list(self._find())
        found: dict[tuple[nn.Module, str], _State] = {}
        for module, values, name in self._places:
            value: Any = values.get(name)
            # Not isinstance, which is slow on a config of transformers: it reads ``__class__``.
            kind = type(value)
            if kind in _PLAIN:
                continue
            if issubclass(kind, Tensor):
                # Running statistics change in place, for the layer alone.
                running = values is module._buffers or value.is_inference()
                found[module, name] = _State(value, (), 0 if running else version_of(value))
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
class SideOutputs:
    """The side outputs of one micro-batch on one stage.

    Args:
        layers: the layers.
        received: what the previous stage sent.
        withheld: filled, per attribute that was not sent, with placeholders, which must not get a
            gradient.
    """

    layers: Sequence[WatchedLayer]
    received: Sequence[SideOutput]
    withheld: dict[str, list[Tensor]]
    _own: list[SideOutput] = field(default_factory=list)
    _outputs: dict[int, Any] = field(default_factory=dict)
    """The outputs of the last two layers, where there are hooks."""
    _read: dict[int, tuple[Any, set[int]]] = field(default_factory=dict)
    """Per layer whose output hooks keep: the output, and the tensors that they keep, by ``id``."""
    _described: dict[int, Any] = field(default_factory=dict)
    """Per layer its output, with descriptions in the place of tensors."""
    _layer: int = -1
    _before: Mapping[tuple[nn.Module, str], _State] = field(default_factory=dict)
    """The attributes of the running layer as they were when it began."""
    _watching: bool = False
    _hooks: list[tuple[dict[int, Any], int, Any]] = field(default_factory=list)
    _lists: list[tuple[list[Any], int]] = field(default_factory=list)
    """Lists that layers have appended to, and how long they were before."""

    def watch(self, own: range) -> None:
        """Watch the hooks and attributes of the stage's layers from now on.

        Hooks of the layer before them fire again on this stage, on what was received.

        Args:
            own: indices of the layers.
        """
        self._watching = True
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            warnings.warn(
                "Forward hooks of all modules (register_module_forward_hook) cannot be followed "
                "from stage to stage: later stages do not see what they collect of earlier "
                "layers. Register hooks on modules instead, if the loss depends on them."
                + see("values-between-layers"),
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
                        "what they collect. Compile the parts of the layer that have no hooks."
                        + see("values-between-layers"),
                        stacklevel=2,
                    )
                else:
                    self._watch_hooks(module, index if not path else None)

    def begin_layer(self, index: int) -> None:
        """Prepare to compute a layer of the stage."""
        if self._watching:
            self._layer = index
            self._before = self.layers[index].attributes()

    def end_layer(self, index: int, output: Any) -> None:
        """Note what a layer of the stage has set, and its output, about to be given to hooks."""
        if self._watching:
            self._note_attributes(index, self._before, output)
            self.note_output(index, output)

    def note_output(self, index: int, output: Any) -> None:
        """Note the output of a layer, about to be given to its hooks."""
        if self._hooks:
            self._outputs = {
                i: o for i, o in {**self._outputs, index: output}.items() if i >= index - 1
            }

    def sent(self) -> tuple[SideOutput, ...]:
        """What is sent to the next stage, after the stage's last layer."""
        self._outputs = {}
        outputs = [
            LayerOutput(index, sendable(output, read, self.layers[index].name))
            for index, (output, read) in self._read.items()
        ]
        known = {side.layer for side in (*self.received, *outputs) if isinstance(side, LayerOutput)}
        *earlier, last = self._described
        unlike = [
            LayerOutput(index, self._described[index])
            for index in earlier
            if index not in known and self._described[index] != self._described[last]
        ]
        return *self.received, *self._own, *outputs, *unlike

    def describe(self, index: int, output: Any) -> None:
        """Note what a layer's output looks like, for stages that replace it by a placeholder."""
        self._described[index] = sendable(output, set(), self.layers[index].name)

    def end(self) -> None:
        """Stop watching; undo appends to lists on stages whose step ends before they are read."""
        for hooks, key, hook in self._hooks:
            if key in hooks:
                hooks[key] = hook
        self._outputs, self._read = {}, {}
        for items, length in reversed(self._lists if self._watching else []):
            del items[length:]

    def replay(self, index: int) -> None:
        """Call the hooks and set the attributes of a layer of an earlier stage, as there."""
        for received in self.received:
            if received.layer != index or isinstance(received, LayerOutput):
                continue
            module = self.layers[index].modules[received.module]
            if isinstance(received, HookCall):
                hooks = list(getattr(module, received.registry).values())
                if received.position < len(hooks):
                    hooks[received.position](module, *fill(received.given, []))
            else:
                self._replay_attribute(module, received)

    def _replay_attribute(self, module: nn.Module, received: Attribute | Appended) -> None:
        places = self.layers[received.layer].name, received.module, received.name
        placeholders = self.withheld.setdefault(".".join(filter(None, places)), [])
        value, now = fill(received.value, placeholders), getattr(module, received.name, None)
        if isinstance(received, Appended) and isinstance(now, list):
            now.extend(value)
            self._note_list(now, value)
        elif isinstance(value, dict) and isinstance(now, dict):
            now.update(value)
        else:
            setattr(module, received.name, value)

    def output(self, index: int, placeholders: list[Tensor]) -> Any:
        """The output of a layer of an earlier stage, if its hooks keep it, else None.

        Args:
            index: of the layer.
            placeholders: filled with those for tensors that were not sent.
        """
        for received in self.received:
            if isinstance(received, LayerOutput) and received.layer == index:
                return fill(received.output, placeholders)
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
        sent = sendable(given, read, f"{layer.name}.{path}")
        self._own.append(HookCall(self._layer, path, registry, position, sent))

    def _note_outputs(self, layer: int, given: tuple[Any, ...], read: set[int]) -> None:
        for index in (layer - 1, layer):
            if index not in self._outputs:
                continue
            output = self._outputs[index]
            leaves = {id(n) for n in nodes(output) if isinstance(n, Tensor)}
            known = read & leaves
            # Another hook of the layer has replaced its output.
            if index == layer and read - leaves - {id(n) for n in nodes(given[0])}:
                known = leaves
            if known:
                self._read.setdefault(index, (output, set()))[1].update(known)

    # Only a layer's own forward is to be compiled.
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
                self._own.append(Appended(*place, _sendable_value(items, output, layer.name)))
                self._note_list(now.value, items)
            elif any(isinstance(item, Tensor) for item in (now.value, *now.items)):
                self._own.append(Attribute(*place, _sendable_value(now.value, output, layer.name)))

    def _note_list(self, items: list[Any], new: Sequence[Any]) -> None:
        # A list of tensors without gradients may be state that the layer reads itself.
        graph = any(isinstance(item, Tensor) and item.requires_grad for item in new)
        if graph or not torch.is_grad_enabled():
            self._lists.append((items, len(items) - len(new)))


def sendable(tree: Any, read: Collection[int], owner: str) -> Any:
    """A pytree as it is sent.

    Args:
        tree: the pytree.
        read: the tensors, by ``id``, that are sent; of others it has descriptions.
        owner: what the tree belongs to, for messages.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if id(value) in read else Unsent.of(value)
        return value if isinstance(value, PLAIN) else _Unsendable(type(value).__name__, owner)

    return leaf(tree) if isinstance(tree, Tensor) else tree_map(leaf, tree)


def _sendable_value(attribute: Any, output: Any, owner: str) -> Any:
    """An attribute as it is sent: tensors up to the output's size, as it may never be read."""
    leaves = tree_leaves(output)
    largest = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
    tensors = [node for node in nodes(attribute) if isinstance(node, Tensor)]
    small = {id(t) for t in tensors if t.nbytes <= largest or not t.is_floating_point()}
    return sendable(attribute, small, owner)
