"""Sends side outputs of layers to later stages: what they give hooks, set, or change in place.

Code behind the layers may read values that a forward hook inside of a layer has collected
(transformers collects router logits, attentions and hidden states this way), or an attribute that a
layer has set (``layer.l_aux``). It runs on the last stage, where layers of earlier stages compute
nothing. So the stage of a layer watches its hooks and attributes, and sends their values with the
activation if a later stage reads them (``message``); each later stage calls the same hooks, and
sets the same attributes, where the layer is called. Gradients return with those of the activation.
Hooks of a layer itself count as code between layers.

A layer may also change an argument in place that was computed before the layers, by each stage for
itself: its first input, or memory that all layers write to. Then the argument is sent, too, and
copied into that of each later stage.
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

from lightning_axosparse.pipeline.crossing.message import ARGUMENT, SideOutput, SidePlace
from lightning_axosparse.pipeline.crossing.placeholder import (
    MODULE_ATTRIBUTES,
    PLAIN,
    Placeholder,
    sendable,
    values_in,
    with_tensors,
)
from lightning_axosparse.pipeline.crossing.skip_tensors import DerivedValues
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.crossing.stray_tensors import StraySearch
from lightning_axosparse.support.object_trees import object_leaves, object_map
from lightning_axosparse.support.torch_internals import (
    is_compiled,
    is_tensor_parallel,
    never_compiled,
    storage_id,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see

_REGISTRIES = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset(PLAIN)
_CONTAINERS = (tuple, list, dict)
"""Arguments of layers in which tensors may be that layers change in place."""


class _AttributeState(NamedTuple):
    """The state of an attribute: a tensor and its version, a list or dict and its items, or any."""

    value: Any
    items: tuple[Any, ...]
    version: int

    def is_prefix_of(self, later: _AttributeState) -> bool:
        """Whether ``later`` is the same object, to which only items were appended."""
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
        # A scripted module has no hooks inside, and Python does not see its attributes change.
        self.watched = {
            path: module
            for path, module in self.modules.items()
            if not isinstance(module, torch.jit.ScriptModule)
        }
        # By id, as the hash of a torchmetrics object changes with its state.
        self.paths = {id(module): path for path, module in self.watched.items()}
        self.compiled = is_compiled(layer)
        self._namespaces = [
            names for module in self.watched.values() for names in (vars(module), module._buffers)
        ]
        self._last_names: list[tuple[int, str | None]] = []
        self._names: list[tuple[str, dict[str, Any], str]] = []

    def attributes(self) -> dict[tuple[str, str], _AttributeState]:
        """Return the state of each attribute that may be a tensor, or contain some."""
        # Called twice for each micro-batch and layer, so names are listed only if some are new: a
        # new one is the last in its dict.
        last_names = [(len(names), next(reversed(names), None)) for names in self._namespaces]
        if last_names != self._last_names:
            self._last_names, self._names = last_names, list(self._list_names())
        states: dict[tuple[str, str], _AttributeState] = {}
        for path, values, name in self._names:
            value: Any = values.get(name)
            # Not isinstance, which is slow on a config of transformers: it reads ``__class__``.
            kind = type(value)
            if kind in _PLAIN:
                continue
            if issubclass(kind, Tensor):
                # Only the layer reads running statistics, which change in place.
                running = values is self.watched[path]._buffers or value.is_inference()
                version = 0 if running else version_of(value)
                states[path, name] = _AttributeState(value, (), version)
            elif issubclass(kind, (list, dict)):
                items = value.values() if issubclass(kind, dict) else value
                states[path, name] = _AttributeState(value, tuple(items), 0)
            else:
                states[path, name] = _AttributeState(value, (), 0)
        return states

    def _list_names(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for path, module in self.watched.items():
            for values, names in (
                (vars(module), vars(module).keys() - MODULE_ATTRIBUTES),
                (module._buffers, module._buffers),
            ):
                for name in sorted(names):
                    yield path, values, name


@dataclass
class SideOutputs:
    """The side outputs of one micro-batch on one stage.

    Attributes:
        run: the run of the step; in a probe, its ``reads`` records the side outputs of the stage's
            layers, and those of earlier layers that hooks store.
        layers: all layers.
        values: the values between layers, of which received side outputs are some.
        first_arguments: those of the first layer that the step gives it, if others replace them.
    """

    run: StepRun
    layers: Sequence[WatchedLayer]
    values: DerivedValues
    first_arguments: Sequence[Any] = field(init=False, default=())
    _own_outputs: list[SideOutput] = field(init=False, default_factory=list)
    _own: range = field(init=False, default=range(0))
    """The stage's layers."""
    _layer: int = field(init=False, default=-1)
    _before: Mapping[tuple[str, str], _AttributeState] = field(init=False, default_factory=dict)
    """The attributes of the running layer before its forward pass."""
    _arguments: list[tuple[Tensor, int | Tensor, Any]] = field(init=False, default_factory=list)
    """The tensors in the running layer's arguments, with version or copy, and node of autograd."""
    _stray: StraySearch | None = field(init=False, default=None)
    """Searches layers in a probe."""
    _hooks: list[tuple[dict[int, Any], int, Any]] = field(init=False, default_factory=list)
    _stored: set[int] = field(init=False, default_factory=set)
    """The ids of the tensors in the side outputs of the running layer."""
    _appended: list[tuple[list[Any], int]] = field(init=False, default_factory=list)
    """Lists to which layers have appended, and their lengths before that."""

    def watch(self, own: range) -> None:
        """Watch the hooks and attributes of the stage's layers from now on."""
        self._own = own
        if self.run.reads is not None:
            self._stray = StraySearch()
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
            for path, module in layer.watched.items():
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

    @never_compiled
    def begin_layer(self, index: int, arguments: Sequence[Any]) -> None:
        """Prepare to compute a layer of the stage."""
        self._layer = index
        self._arguments = []
        for each in arguments:
            for leaf in object_leaves(each, Tensor) if type(each) in _CONTAINERS else (each,):
                if isinstance(leaf, Tensor):
                    # One that was made in inference mode has no version.
                    state = leaf.clone() if leaf.is_inference() else version_of(leaf)
                    self._arguments.append((leaf, state, leaf.requires_grad and leaf.grad_fn))
        self._before = self.layers[index].attributes()
        self._stored.clear()
        if self._stray is not None:
            self._stray.begin(self.layers[index].modules[""], arguments)

    @never_compiled
    def end_layer(self, index: int, output: Any) -> Any:
        """Record the attributes that a layer of the stage has set; return its output.

        On later stages, a side output and an argument or the output of the layer are two tensors.
        So they are here, too: functions of one of them have numbers (``skip_tensors``).
        """
        layer = self.layers[index]
        for position, (argument, state, node) in enumerate(self._arguments):
            if isinstance(state, Tensor):
                is_changed = not torch.equal(argument, state)
            else:
                is_changed = version_of(argument) != state
            if is_changed:
                has_graph = argument.requires_grad and argument.grad_fn is not node
                self._record_change(SidePlace(index, "", ARGUMENT, position), argument, has_graph)
        for (path, name), now in layer.attributes().items():
            before, module = self._before.get((path, name)), layer.modules[path]
            place = SidePlace(index, path, name)
            # None if the attribute was replaced.
            length = len(before.items) if before is not None and before.is_prefix_of(now) else None
            if length == len(now.items):
                continue
            if length is not None and isinstance(now.value, list):
                items = list(now.items[length:])
                self._record(SideOutput(place, items, is_appended=True))
                self._set_apart(module, name, now.value, length)
                self._record_append(now.value, items)
            elif tensors := object_leaves(now.value, Tensor):
                is_output = not set(map(id, tensors)).isdisjoint(
                    map(id, object_leaves(output, Tensor))
                )
                self._record(SideOutput(place, now.value, is_output=is_output))
                self._set_apart(module, name, now.value)
        if self._stray is not None:
            self._warn_of_stray_tensors(self._stray, layer, output)
        # An argument from before the layers has no number on later stages.
        for each in output if type(output) is tuple else (output,):
            if any(each is argument for argument, *_ in self._arguments):
                self._stored.add(id(each))
        if not self._stored:
            return output
        return tuple(map(self._apart, output)) if type(output) is tuple else self._apart(output)

    def _warn_of_stray_tensors(self, stray: StraySearch, layer: WatchedLayer, output: Any) -> None:
        if stray.finds_one(layer.modules[""], output, self._stored):
            warnings.warn(
                f"Layer {layer.name!r} stores a tensor outside its modules, its output and what it "
                "is given: in another module, a class or a global variable. Code behind the layers"
                " runs on the rank of the last stage, and does not see what layers of other ranks "
                "store there. If it reads that, as a loss of all layers would, set it as an "
                "attribute of the layer." + see("values-between-layers"),
                stacklevel=2,
            )

    def _record_change(self, place: SidePlace, argument: Tensor, has_graph: bool) -> None:
        """Record that a layer has changed an argument in place, in the graph or beside it."""
        reads, sent = self.run.reads, self.run.sent
        assert sent is not None
        if isinstance(argument, nn.Parameter):
            raise MisconfigurationException(
                f"Layer {self.layers[place.layer].name!r} changes a parameter that it is given, on "
                "one rank and for each micro-batch. Change parameters in hooks, such as "
                "`on_train_batch_end`." + see("values-between-layers")
            )
        if place.layer == 0 and self.first_arguments:
            changed, argument = argument, _tensors_of(self.first_arguments)[place.position]
            if argument is not changed:
                _copy_into(argument, changed if has_graph else changed.detach())
        if reads is not None and self.values.is_numbered(argument):  # It is sent as it is then.
            reads.side_outputs |= {place, place._replace(leaf=0)}
        elif reads is not None or sent.sends_side_output(place):
            # A copy, as changes to the module are undone after the run.
            value = argument if has_graph else argument.detach()
            self._record(SideOutput(place, value.clone()))
            self._stored.add(id(argument))
        else:
            self._validate_change(place.layer, argument)

    def _validate_change(self, index: int, argument: Tensor) -> None:
        """Check that what a layer changes is no received output that is a side output, too."""
        received, changed = self.run.received.content, storage_id(argument.untyped_storage())
        outputs = object_leaves(received.output, Tensor)
        if all(storage_id(each.untyped_storage()) != changed for each in outputs):
            return
        for side in received.side_outputs:
            is_last = side.place.layer == self._own.start - 1
            is_sent = any(isinstance(each, Tensor) for each in values_in(side.value))
            if side.is_output and is_last and is_sent:
                before, place = self.layers[side.place.layer].name, side.place
                path = ".".join(filter(None, (before, place.module, place.name)))
                raise MisconfigurationException(
                    f"Layer {self.layers[index].name!r} changes the output of layer {before!r} in "
                    f"place, and {path!r}, which the step reads, is this output: on the rank of "
                    f"{before!r} it does not change. Do not change it in place, store a copy, or "
                    "put both layers into one stage (balance=...)." + see("values-between-layers")
                )

    def _apart(self, output: Any) -> Any:
        """Return another tensor than that of a side output."""
        is_stored = isinstance(output, Tensor) and id(output) in self._stored
        return _view(output) if is_stored else output

    def _set_apart(self, module: nn.Module, name: str, value: Any, first: int = 0) -> None:
        """Replace the tensors of an attribute, from an item on, that are arguments of the layer."""

        def apart(tree: Any) -> Any:
            is_numbered = self.values.is_numbered
            if not any(map(is_numbered, object_leaves(tree, Tensor))):
                return tree
            return object_map(Tensor, lambda t: _view(t) if is_numbered(t) else t, tree)

        if not isinstance(value, list | dict):
            setattr(module, name, apart(value))
            return
        items = value.items() if isinstance(value, dict) else enumerate(value[first:], first)
        for key, item in list(items):
            value[key] = apart(item)

    def to_send(self) -> tuple[SideOutput, ...]:
        """Return the side outputs for the next stage, after the stage's last layer."""
        received = [self._sendable(each) for each in self.run.received.content.side_outputs]
        return (*(side for side in received if side is not None), *self._own_outputs)

    def end(self) -> None:
        """Stop watching; undo appends to lists, except on the last stage, which reads them."""
        for hooks, key, hook in self._hooks:
            if key in hooks:
                hooks[key] = hook
        for items, length in reversed(self._appended if self.run.sent is not None else []):
            del items[length:]

    def replay(self, index: int, arguments: Sequence[Any]) -> None:
        """Repeat the effects of a layer of an earlier stage: on hooks, attributes and arguments."""
        layer = self.layers[index]
        received: Sequence[SideOutput] = self.run.received.content.side_outputs
        sides = [side for side in received if side.place.layer == index]
        lengths: dict[int, int] = {}
        for side in sides:
            if side.is_appended:
                items = getattr(layer.modules[side.place.module], side.place.name, None)
                lengths[id(items)] = len(items) if isinstance(items, list) else 0
        for side in sides:
            module = layer.modules[side.place.module]
            path = ".".join(filter(None, (layer.name, side.place.module)))
            if side.place.name == ARGUMENT:
                self._replay_change(side, _tensors_of(arguments)[side.place.position], path)
            elif side.place.of_attribute:
                self._replay_attribute(module, side, path, lengths)
            else:
                self._replay_hook(module, side, path)

    def _replay_change(self, change: SideOutput, argument: Tensor, path: str) -> None:
        # What an earlier stage has sent has its changes.
        if not self.values.is_received(argument):
            _copy_into(argument, self._received_value(change, f"an argument of {path!r}"))

    def _replay_hook(self, module: nn.Module, call: SideOutput, path: str) -> None:
        hooks = list(getattr(module, call.place.name).values())
        if call.place.position < len(hooks):
            source = f"an argument of a hook of {path!r}"
            hooks[call.place.position](module, *self._received_value(call, source))
        if self.run.reads is not None and self.values.keep_arguments(call.place):
            self.run.reads.read.add(call.place)

    def _replay_attribute(
        self, module: nn.Module, side: SideOutput, path: str, lengths: Mapping[int, int]
    ) -> None:
        name = side.place.name
        value = self._received_value(side, f"{f'{path}.{name}'!r}, which a layer sets,")
        now = getattr(module, name, None)
        if side.is_appended and isinstance(now, list):
            # Hooks may have appended to it as well, and other modules may have the same list.
            now[lengths.get(id(now), len(now)) :] = value
            self._record_append(now, value)
        elif isinstance(value, dict) and isinstance(now, dict):
            now.update(value)
        else:
            setattr(module, name, value)

    def _received_value(self, side: SideOutput, source: str) -> Any:
        """Return a received value, with placeholders for tensors that were not sent."""

        def alias_or_placeholder(leaf: int, value: Any) -> Tensor:
            if isinstance(value, Tensor):
                return self.values.alias(value, side.place._replace(leaf=leaf))
            return Placeholder.of(value, self.run.progress, source)

        return with_tensors(side.value, alias_or_placeholder)

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
        def watched(module: nn.Module, *args: Any) -> Any:
            path = self.layers[self._layer].paths[id(module)]
            self._record(SideOutput(SidePlace(self._layer, path, registry, position), args))
            return hook(module, *args)

        watched.watched_by = self  # type: ignore[attr-defined]
        return watched

    def _record(self, side: SideOutput) -> None:
        """Record a side output of a layer of the stage."""
        self._stored.update(map(id, object_leaves(side.value, Tensor)))
        if self.run.reads is not None:
            leaves = range(-1, len(values_in(side.value)))
            self.run.reads.side_outputs |= {side.place._replace(leaf=leaf) for leaf in leaves}
        if (sent := self._sendable(side)) is not None:
            self._own_outputs.append(sent)

    def _sendable(self, side: SideOutput) -> SideOutput | None:
        """Return a side output as it is sent; None if it is not."""
        sent, place = self.run.sent, side.place
        assert sent is not None
        if not (place.of_attribute or sent.sends_side_output(place)):
            return None
        path = "" if place.of_attribute else place.module
        owner = ".".join(filter(None, (self.layers[place.layer].name, path)))

        def is_sent(leaf: int) -> bool:
            return sent.sends_side_output(place._replace(leaf=leaf))

        return side._replace(value=sendable(side.value, is_sent, owner))

    def _record_append(self, items: list[Any], new: Sequence[Any]) -> None:
        # A list of tensors without gradients may be state that the layer reads itself.
        has_graph = any(isinstance(item, Tensor) and item.requires_grad for item in new)
        if has_graph or not torch.is_grad_enabled():
            self._appended.append((items, len(items) - len(new)))


def _tensors_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in the arguments of a layer, as :meth:`SideOutputs.begin_layer` does."""
    return [
        leaf
        for each in arguments
        if isinstance(each, Tensor) or type(each) in _CONTAINERS
        for leaf in object_leaves(each, Tensor)
    ]


def _copy_into(tensor: Tensor, value: Tensor) -> None:
    """Change a tensor in place: in its graph if the value has one."""
    (tensor if value.requires_grad else tensor.detach()).copy_(value)


def _view(tensor: Tensor) -> Tensor:
    # A view that is created without gradients could not be changed in place with them.
    has_graph = tensor.requires_grad and torch.is_grad_enabled()
    return tensor.view_as(tensor) if has_graph else tensor.detach()
