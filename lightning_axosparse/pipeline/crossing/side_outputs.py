"""Sends the side outputs of layers to later stages: what forward hooks and attributes hold.

Code behind the layers may read what a forward hook inside of a layer has collected (transformers
collects router logits, attentions and hidden states this way), or an attribute that a layer has set
(``layer.l_aux``). It runs on the last stage, where layers of earlier stages compute nothing. So the
stage of a layer watches its hooks and attributes and sends what they hold with the activation, as
far as a later stage reads it (``message``); each later stage calls the same hooks, and sets the
same attributes, where the layer is called. Gradients return with those of the activation. Without
such hooks and attributes nothing is sent. Hooks of a layer itself are code between layers.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_axosparse.pipeline.crossing.message import Reads, Sent, SideOutput, SidePlace
from lightning_axosparse.pipeline.crossing.placeholder import (
    OF_EVERY_MODULE,
    PLAIN,
    Placeholder,
    Progress,
    filled,
    sendable,
    values_in,
)
from lightning_axosparse.pipeline.crossing.skip_tensors import DerivedValues
from lightning_axosparse.support.torch_internals import (
    is_compiled,
    is_tensor_parallel,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset(PLAIN)


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
    """A layer's modules, and the tensors among their attributes."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name = name
        self.modules = dict(layer.named_modules())
        # A scripted module has neither hooks inside nor attributes that Python sees change.
        self.paths = {
            module: path
            for path, module in self.modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        self.compiled = is_compiled(layer)
        self._namespaces = [
            names for module in self.paths for names in (vars(module), module._buffers)
        ]
        self._entries = 0
        self._places: list[tuple[nn.Module, dict[str, Any], str]] = []

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
                (vars(module), vars(module).keys() - OF_EVERY_MODULE),
                (module._buffers, module._buffers),
            ):
                for name in sorted(names):
                    yield module, values, name


@dataclass
class SideOutputs:
    """The side outputs of one micro-batch on one stage.

    ``sent`` is None on the last stage. ``reads`` is filled with what the stage's layers leave, and
    the hooks whose calls leave something; it is None where that is known.
    """

    layers: Sequence[WatchedLayer]
    received: Sequence[SideOutput]
    values: DerivedValues
    progress: Progress
    sent: Sent | None
    reads: Reads | None
    _own: list[SideOutput] = field(default_factory=list)
    _layer: int = -1
    _before: Mapping[tuple[nn.Module, str], _State] = field(default_factory=dict)
    """The attributes of the running layer as they were when it began."""
    _hooks: list[tuple[dict[int, Any], int, Any]] = field(default_factory=list)
    _lists: list[tuple[list[Any], int]] = field(default_factory=list)
    """Lists that layers have appended to, and how long they were before."""

    def watch(self, own: range) -> None:
        """Watch the hooks and attributes of the stage's layers from now on."""
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            warnings.warn(
                "Forward hooks of all modules (register_module_forward_hook) cannot be followed "
                "from stage to stage: later stages do not see what they collect of earlier "
                "layers. Register hooks on modules instead, if the loss depends on them."
                + see("values-between-layers"),
                stacklevel=2,
            )
        for index in own:
            layer = self.layers[index]
            for module, path in layer.paths.items():
                if not (path and (module._forward_hooks or module._forward_pre_hooks)):
                    continue
                if layer.compiled:
                    warnings.warn(
                        f"{layer.name + '.' + path!r} has forward hooks, but is inside a "
                        "compiled layer, where they cannot be followed: later stages do not see "
                        "what they collect. Compile the parts of the layer that have no hooks."
                        + see("values-between-layers"),
                        stacklevel=2,
                    )
                else:
                    self._watch_hooks(module)

    def begin_layer(self, index: int) -> None:
        """Prepare to compute a layer of the stage."""
        self._layer = index
        self._before = self.layers[index].attributes()

    def end_layer(self, index: int) -> None:
        """Note what a layer of the stage has set."""
        layer = self.layers[index]
        for (module, name), now in layer.attributes().items():
            old = self._before.get((module, name))
            place = SidePlace(index, layer.paths[module], name)
            known = len(old.items) if old is not None and old.begins(now) else None
            if known == len(now.items):
                continue
            if known is not None and isinstance(now.value, list):
                items = list(now.items[known:])
                self._note(SideOutput(place, items, is_appended=True))
                self._note_list(now.value, items)
            elif any(isinstance(item, Tensor) for item in (now.value, *now.items)):
                self._note(SideOutput(place, now.value))

    def to_send(self) -> tuple[SideOutput, ...]:
        """What is sent to the next stage, after the stage's last layer."""
        received = [sent for each in self.received if (sent := self._sendable(each)) is not None]
        return (*received, *self._own)

    def end(self) -> None:
        """Stop watching; undo appends to lists on stages whose step ends before they are read."""
        for hooks, key, hook in self._hooks:
            if key in hooks:
                hooks[key] = hook
        for items, length in reversed(self._lists if self.sent is not None else []):
            del items[length:]

    def replay(self, index: int) -> None:
        """Call the hooks and set the attributes of a layer of an earlier stage, as there."""
        layer = self.layers[index]
        lengths: dict[int, int] = {}
        for received in self.received:
            if received.place.layer == index and received.is_appended:
                items = getattr(layer.modules[received.place.module], received.place.name, None)
                lengths[id(items)] = len(items) if isinstance(items, list) else 0
        for received in self.received:
            place = received.place
            if place.layer != index:
                continue
            module = layer.modules[place.module]
            path = ".".join(filter(None, (layer.name, place.module)))
            if place.of_hook:
                self._replay_hook(module, received, path)
            else:
                self._replay_attribute(module, received, path, lengths)

    def _replay_hook(self, module: nn.Module, call: SideOutput, path: str) -> None:
        hooks = list(getattr(module, call.place.name).values())
        if call.place.position < len(hooks):
            source = f"what a hook of {path!r} is given"
            hooks[call.place.position](module, *self._filled(call, source))
        if self.reads is not None and self.values.holds(call.place):
            self.reads.read.add(call.place)

    def _replay_attribute(
        self, module: nn.Module, received: SideOutput, path: str, lengths: Mapping[int, int]
    ) -> None:
        name = received.place.name
        value = self._filled(received, f"{f'{path}.{name}'!r}, which a layer sets,")
        now = getattr(module, name, None)
        if received.is_appended and isinstance(now, list):
            # Hooks may have appended to it as well, and other modules may have the same list.
            now[lengths.get(id(now), len(now)) :] = value
            self._note_list(now, value)
        elif isinstance(value, dict) and isinstance(now, dict):
            now.update(value)
        else:
            setattr(module, name, value)

    def _filled(self, received: SideOutput, source: str) -> Any:
        """What was received, with placeholders for what was not sent of it."""

        def put(leaf: int, value: Any) -> Tensor:
            if isinstance(value, Tensor):
                return self.values.alias(value, received.place._replace(leaf=leaf))
            return Placeholder.of(value, self.progress, source)

        return filled(received.value, put)

    def _watch_hooks(self, module: nn.Module) -> None:
        for registry in _REGISTRIES:
            hooks = getattr(module, registry)
            for position, (key, hook) in enumerate(list(hooks.items())):
                if getattr(hook, "watched_by", None) is self or is_tensor_parallel(hook):
                    continue
                hooks[key] = self._watched(hook, registry, position)
                self._hooks.append((hooks, key, hook))

    def _watched(
        self, hook: Callable[..., Any], registry: str, position: int
    ) -> Callable[..., Any]:
        def watched(module: nn.Module, *given: Any) -> Any:
            path = self.layers[self._layer].paths[module]
            self._note(SideOutput(SidePlace(self._layer, path, registry, position), given))
            return hook(module, *given)

        watched.watched_by = self  # type: ignore[attr-defined]
        return watched

    def _note(self, left: SideOutput) -> None:
        """Note what a layer of the stage has left."""
        if self.reads is not None:
            leaves = range(-1, len(values_in(left.value)))
            self.reads.seen |= {left.place._replace(leaf=leaf) for leaf in leaves}
        if (side := self._sendable(left)) is not None:
            self._own.append(side)

    def _sendable(self, left: SideOutput) -> SideOutput | None:
        """What is sent of something that a layer has left; None for nothing."""
        sent, place = self.sent, left.place
        assert sent is not None
        if place.of_hook and not sent.sends(place):
            return None
        owner = self.layers[place.layer].name + (f".{place.module}" if place.of_hook else "")
        value = sendable(left.value, lambda leaf: sent.sends(place._replace(leaf=leaf)), owner)
        return left._replace(value=value)

    def _note_list(self, items: list[Any], new: Sequence[Any]) -> None:
        # A list of tensors without gradients may be state that the layer reads itself.
        graph = any(isinstance(item, Tensor) and item.requires_grad for item in new)
        if graph or not torch.is_grad_enabled():
            self._lists.append((items, len(items) - len(new)))
