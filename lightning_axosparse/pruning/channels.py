"""Finds the channels of a network that can be removed, and every layer that has them.

The network is traced with :mod:`torch.fx`, without an input and without the values of its weights,
so it may be on the meta device. A channel can be removed if it is the output of a convolution or a
linear layer, scaled by one BatchNorm before anything else reads it, and then passes only through
operations that map zero to zero until convolutions and linear layers read it. Then the network
without it has the same outputs as the network with the scale and shift of the channel at zero.

Channels stay where they are added to others (a residual stream), multiplied with them, or read by a
grouped convolution or an operation that is not known here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lightning_axosparse.pruning.tracing import asks_for_type, has_hooks, trace
from lightning_axosparse.sparse.module.parameters import owned_parameters
from lightning_axosparse.support.torch_internals import tree_leaves
from lightning_axosparse.support.troubleshooting import first_few, see


class _Places(NamedTuple):
    """The attributes with a layer's sizes, and the dimensions of its weight."""

    inputs: str
    outputs: str
    input_dimension: int
    output_dimension: int


_CONVOLUTION = _Places("in_channels", "out_channels", 1, 0)
_TRANSPOSED = _Places("in_channels", "out_channels", 0, 1)
_LINEAR = _Places("in_features", "out_features", 1, 0)

WEIGHTED: dict[type[nn.Module], _Places] = {
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Conv3d: _CONVOLUTION,
    nn.ConvTranspose1d: _TRANSPOSED,
    nn.ConvTranspose2d: _TRANSPOSED,
    nn.ConvTranspose3d: _TRANSPOSED,
    nn.Linear: _LINEAR,
}
"""Layers whose outputs are sums over their inputs; no subclasses, which may compute otherwise."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

PLACES = {**WEIGHTED, **dict.fromkeys(BATCH_NORMS, _Places("num_features", "num_features", 0, 0))}
"""Layers with channels."""


def layer_inputs(layer: nn.Module) -> int:
    """Return the number of inputs, or input channels, of a layer in :data:`PLACES`."""
    return int(getattr(layer, PLACES[type(layer)].inputs))


def layer_outputs(layer: nn.Module) -> int:
    """Return the number of outputs, or channels, of a layer in :data:`PLACES`."""
    return int(getattr(layer, PLACES[type(layer)].outputs))


_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Hardswish, nn.Tanh, nn.Softsign),
)
_POOLINGS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    nn.Upsample,
)
_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "relu", "relu_", "relu6", "leaky_relu"),
    *("elu", "celu", "selu", "gelu", "silu", "mish", "hardswish", "tanh", "softsign"),
)
_POOLING_FUNCTIONS = (
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "interpolate"),
)
_SUMS = ("add", "add_", "iadd")
_SPATIAL = ({2, 3}, {-1, -2})
"""The dimensions of a map over which a mean leaves one number a channel."""


@dataclass(frozen=True)
class Segment:
    """Consecutive inputs of a layer that come from the channels of one layer.

    Attributes:
        scale: name of the BatchNorm that scales these channels; None if none can be removed.
        entries: number of the layer's inputs: the channels, or a multiple of them after a flatten.
    """

    scale: str | None
    entries: int


@dataclass(frozen=True)
class Channels:
    """The channels of a network that can be removed.

    Attributes:
        scales: name of a BatchNorm -> its channels, in the order of the network.
        outputs: name of a layer -> the BatchNorm whose mask prunes its outputs.
        inputs: name of a layer -> the segments of its inputs, in order, where some can be removed.
        whole: name of a layer -> the reason why none of its outputs can be removed.
    """

    scales: Mapping[str, int]
    outputs: Mapping[str, str]
    inputs: Mapping[str, Sequence[Segment]]
    whole: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe which channels can be removed, and why the others cannot."""
        by_reason: dict[str, list[str]] = {}
        for layer, reason in self.whole.items():
            by_reason.setdefault(reason, []).append(layer)
        lines = [f"{sum(self.scales.values())} channels of {len(self.scales)} layers can go."]
        lines += [
            f"Whole: {first_few(layers)}, because {why}." for why, layers in by_reason.items()
        ]
        return "\n".join(lines)

    def fit(self, sizes: Mapping[str, int]) -> bool:
        """Whether these are channels of scales of such sizes; False for contents of any types."""
        tables = (self.scales, self.outputs, self.inputs, self.whole)
        if not all(isinstance(table, Mapping) for table in tables) or self.scales != sizes:
            return False
        segments = [segment for each in self.inputs.values() for segment in each]
        named = [*self.outputs.values(), *(s.scale for s in segments if s.scale is not None)]
        if not all(isinstance(name, str) and name in sizes for name in named):
            return False
        counts = [(s.entries, 1 if s.scale is None else sizes[s.scale]) for s in segments]
        return all(type(entries) is int and entries % size == 0 for entries, size in counts)

    def output_masks(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return layer -> bool tensor, False for each output that these masks prune."""
        return {layer: masks[scale] for layer, scale in self.outputs.items()}

    def input_masks(self, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return layer -> bool tensor, False for each input that these masks prune."""
        return {
            layer: torch.cat([_input_mask(segment, masks) for segment in segments])
            for layer, segments in self.inputs.items()
        }


def _input_mask(segment: Segment, masks: Mapping[str, Tensor]) -> Tensor:
    if segment.scale is None:
        return torch.ones(segment.entries, dtype=torch.bool)
    mask = masks[segment.scale]
    return mask.repeat_interleave(segment.entries // mask.numel())


def find_channels(module: nn.Module, network: str | None = None) -> Channels:
    """Trace a module, and find the channels that can be removed from it.

    Args:
        module: the module; its tensors may be on the meta device.
        network: name of the part to trace, by its ``forward``; None: the module. All its outputs
            stay. Layers that are used elsewhere, too, must be called in it likewise.

    Raises:
        ValueError: if there is no such part, its ``forward`` cannot be traced, or none of its
            channels can be removed; says why.
    """
    modules = dict(module.named_modules())
    if network is not None and network not in modules:
        raise ValueError(
            f"network='{network}' is no part of the module. There are: "
            f"{', '.join(name for name, _ in module.named_children())}." + see("channels")
        )
    part = modules[network or ""]
    graph = trace(part)
    prefix = f"{network}." if network else ""
    channels = _Reader(part, prefix).read(graph)
    if not channels.scales:
        reasons = "; ".join(f"{name}: {why}" for name, why in channels.whole.items())
        raise ValueError(
            f"{type(part).__name__} has no channels that can be removed. A convolution or linear "
            "layer has to be followed by a BatchNorm with a scale, and then by a convolution or "
            f"linear layer. {reasons or 'There is no BatchNorm'}." + see("channels")
        )
    return channels


# Traced values


@dataclass(eq=False)
class _Outputs:
    """The output channels of one layer, their BatchNorm, and why they cannot be removed, if so."""

    layer: str
    width: int
    scale: str | None = None
    reason: str | None = None

    def retain(self, reason: str) -> None:
        """Let no channel be removed; the first reason counts."""
        self.reason = self.reason or reason


@dataclass(frozen=True)
class _Part:
    outputs: _Outputs
    scaled: bool


@dataclass(frozen=True)
class _Value:
    """A tensor whose channels are known.

    Attributes:
        parts: the layers' outputs that it consists of, in order along dimension 1.
        form: "map": (batch, channel, place...); "vector": (batch, channel); "flat": (batch, channel
            times places).
    """

    parts: tuple[_Part, ...]
    form: str

    @property
    def width(self) -> int:
        return sum(part.outputs.width for part in self.parts)


@dataclass(frozen=True)
class _Shape:
    """The shape of a value."""

    of: _Value


class _BatchSize:
    """The first entry of a shape: the number of samples."""


class _Reader:
    """Follows channels through a traced graph."""

    def __init__(self, part: nn.Module, prefix: str) -> None:
        self._modules, self._prefix = dict(part.named_modules()), prefix
        self._outputs: list[_Outputs] = []
        self._scales: dict[str, _Outputs] = {}
        self._readers: dict[str, _Value] = {}
        self._whole: dict[str, str] = {}
        owned = owned_parameters(part)
        self._read_elsewhere = {
            owner for entry in owned if len(entry.owners) > 1 for owner, _ in entry.owners
        }
        self._calls: Counter[nn.Module] = Counter()

    def read(self, graph: fx.Graph) -> Channels:
        """Return the channels of a graph that can be removed."""
        for node in graph.nodes:
            if node.op == "call_module":
                self._calls.update(self._modules[str(node.target)].modules())
            elif node.op == "get_attr" and not all(map(asks_for_type, node.users)):
                self._read_elsewhere.add(self._modules[str(node.target).rpartition(".")[0]])
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            args = fx.node.map_arg(node.args, values.get)
            kwargs = fx.node.map_arg(node.kwargs, values.get)
            if node.op == "output":
                self._retain((args, kwargs), "the network returns them")
            elif node.op == "call_module":
                values[node] = self._module(str(node.target), args, kwargs)
            elif node.op in ("call_function", "call_method"):
                name = node.target if node.op == "call_method" else node.target.__name__
                values[node] = self._function(str(name), args, kwargs)
        return self._channels()

    def _channels(self) -> Channels:
        removable = {scale: o for scale, o in self._scales.items() if o.reason is None}
        outputs = {o.layer: scale for scale, o in removable.items()}
        outputs.update({scale: scale for scale in removable})
        inputs = {}
        for layer, value in self._readers.items():
            spread = layer_inputs(self._layer(layer)) // value.width
            segments = [_segment(part.outputs, spread) for part in value.parts]
            if any(segment.scale is not None for segment in segments):
                inputs[layer] = segments
        reasons = {o.layer: o.reason for o in self._outputs if o.reason is not None}
        scales = {scale: o.width for scale, o in removable.items()}
        return Channels(scales, outputs, inputs, {**self._whole, **reasons})

    def _layer(self, name: str) -> nn.Module:
        layer: nn.Module = self._modules[name.removeprefix(self._prefix)]
        return layer

    def _module(self, target: str, args: Any, kwargs: Any) -> Any:
        layer, name = self._modules[target], f"{self._prefix}{target}"
        value = args[0] if len(args) == 1 and not kwargs else None
        if why := self._why_whole(layer):
            if type(layer) in PLACES:
                self._whole[name] = why
            return self._retain((args, kwargs), f"'{name}' reads them: {why}")
        if type(layer) in WEIGHTED:
            return self._weighted(name, layer, value, args, kwargs)
        if isinstance(value, _Value):
            if type(layer) in BATCH_NORMS:
                return self._normalized(name, layer, value)
            pools = type(layer) in _POOLINGS and value.form == "map"
            if type(layer) in _MODULES or (pools and not getattr(layer, "return_indices", False)):
                return value
            if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
                return _flat(value)
        if type(layer) in BATCH_NORMS:
            self._whole[name] = "it is not known whose outputs it normalizes"
        return self._retain((args, kwargs), f"'{name}' ({type(layer).__name__}) reads them")

    def _why_whole(self, layer: nn.Module) -> str | None:
        """Return why other code than a layer's ``forward`` may need all of its channels, if so."""
        if has_hooks(layer):
            return "it has forward hooks"
        if type(layer) not in PLACES:
            return None
        if self._calls[layer] > 1:
            return "called more than once"
        is_read = layer in self._read_elsewhere or layer._parameters.get("weight") is None
        return "its weight is tied, read elsewhere, or none" if is_read else None

    def _weighted(self, name: str, layer: Any, value: Any, args: Any, kwargs: Any) -> Any:
        linear = isinstance(layer, nn.Linear)
        grouped = getattr(layer, "groups", 1) > 1
        reads = isinstance(value, _Value) and not grouped and linear == (value.form != "map")
        if reads and layer_inputs(layer) % value.width == 0:
            self._readers[name] = value
            for part in value.parts:
                if not part.scaled:
                    part.outputs.retain(f"'{name}' reads them without a BatchNorm before it")
        else:
            kind = "grouped convolution" if grouped else type(layer).__name__
            self._retain((args, kwargs), f"'{name}' ({kind}) reads them")
        if linear and name not in self._readers:
            return None  # Its input may have any number of dimensions.
        outputs = _Outputs(name, layer_outputs(layer))
        if grouped:
            outputs.retain("it is a grouped convolution, whose groups share no inputs")
        self._outputs.append(outputs)
        return _Value((_Part(outputs, scaled=False),), "vector" if linear else "map")

    def _normalized(self, name: str, layer: nn.Module, value: _Value) -> Any:
        first, *others = value.parts
        width = layer_outputs(layer)
        if others or first.scaled or first.outputs.scale is not None or width != value.width:
            why = "it normalizes channels of several layers, or of another BatchNorm"
            self._whole[name] = why
            return self._retain(value, f"'{name}' reads them, and {why}")
        first.outputs.scale = name
        self._scales[name] = first.outputs
        form = "vector" if value.form == "flat" else value.form
        return _Value((_Part(first.outputs, scaled=True),), form)

    def _function(self, name: str, args: Any, kwargs: Any) -> Any:
        value = args[0] if args else None
        if isinstance(value, _Shape):
            return self._of_shape(name, value, args)
        if isinstance(value, _Value):
            if name in ("size", "getattr"):
                return self._shape(name, value, args, kwargs)
            alone = not any(isinstance(v, _Value | _Shape) for v in tree_leaves((args[1:], kwargs)))
            pools = name in _POOLING_FUNCTIONS and value.form == "map"
            if alone and (name in _FUNCTIONS or (pools and not kwargs.get("return_indices"))):
                return value
            if _flattens(name, args, kwargs):
                return _flat(value)
            if name == "mean" and self._has_height_and_width(value) and _means_places(args, kwargs):
                return value if kwargs.get("keepdim") else _Value(value.parts, "vector")
        if name in ("cat", "concat", "concatenate"):
            return self._concatenated(args, kwargs)
        if name in _SUMS:
            return self._retain((args, kwargs), "they are added to others (a residual stream)")
        return self._retain((args, kwargs), f"{name} reads them")

    def _has_height_and_width(self, value: _Value) -> bool:
        """Whether a value is a map with a height and a width."""
        layers = [type(self._layer(part.outputs.layer)) for part in value.parts]
        return value.form == "map" and {*layers} <= {nn.Conv2d, nn.ConvTranspose2d}

    def _concatenated(self, args: Any, kwargs: Any) -> Any:
        tensors, *rest = args or (kwargs.get("tensors"),)
        dimension = rest[0] if rest else kwargs.get("dim", kwargs.get("axis", 0))
        if not isinstance(tensors, list | tuple):
            return self._retain((args, kwargs), "they are concatenated with unknown values")
        forms = {t.form for t in tensors if isinstance(t, _Value)}
        known = all(isinstance(t, _Value) for t in tensors)
        if known and dimension == 1 and forms in ({"map"}, {"vector"}):
            return _Value(tuple(part for t in tensors for part in t.parts), forms.pop())
        return self._retain((args, kwargs), "they are concatenated with others that are not known")

    def _shape(self, name: str, value: _Value, args: Any, kwargs: Any) -> Any:
        if name == "getattr" and args[1] != "shape":
            return self._retain(value, f"their attribute {args[1]} is read")
        shape = _Shape(value)
        if name == "getattr" or (len(args) == 1 and not kwargs):
            return shape
        return self._of_shape("getitem", shape, (shape, args[1] if len(args) > 1 else None))

    def _of_shape(self, name: str, shape: _Shape, args: Any) -> Any:
        index = args[1] if len(args) > 1 else None
        if name == "getitem" and isinstance(index, int) and index != 1:
            if index == 0:
                return _BatchSize()
            if shape.of.form == "map" and index in (2, 3, 4, -1, -2):
                return None
        return self._retain(shape, "their number is read")

    def _retain(self, read: Any, reason: str) -> Any:
        """Let no channel of the values that are read be removed; the result is unknown."""
        for value in tree_leaves(read):
            if isinstance(value, _Shape):
                value = value.of
            if isinstance(value, _Value):
                for part in value.parts:
                    part.outputs.retain(reason)
        return None


def _segment(outputs: _Outputs, spread: int) -> Segment:
    return Segment(None if outputs.reason else outputs.scale, spread * outputs.width)


def _flat(value: _Value) -> _Value:
    return _Value(value.parts, "flat" if value.form == "map" else value.form)


def _flattens(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a call flattens all dimensions but the batch dimension."""
    if name == "flatten":
        dimensions = [*args[1:], *kwargs.values()]
        return dimensions in ([1], [1, -1])
    if name in ("view", "reshape"):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return len(sizes) == 2 and isinstance(sizes[0], _BatchSize) and sizes[1] == -1
    return False


def _means_places(args: Any, kwargs: Any) -> bool:
    """Return whether a mean is over the height and width of a map."""
    dimensions = args[1] if len(args) > 1 else kwargs.get("dim")
    return isinstance(dimensions, list | tuple) and set(dimensions) in _SPATIAL
