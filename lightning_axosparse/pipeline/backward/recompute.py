"""Activation checkpointing: saves the inputs of a segment of layers and recomputes the rest.

``torch.utils.checkpoint`` takes one function, but the user's code calls the layers of a pipeline
one by one, with other code in between. So a segment grows with each call. An input that is an
output of the layer before is not saved, as the second pass computes it again: a segment of k layers
saves its first input, and other inputs such as a mask. The results of collectives inside layers are
saved, too, so that none runs twice.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_axosparse.distributed.collective_results import CollectiveResults
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.torch_internals import (
    tree_leaves,
    tree_map,
    tree_map_only,
    version_of,
)
from lightning_axosparse.support.troubleshooting import see, without_link

_SAME_BOTH_TIMES = (
    "A layer that is recomputed has to do the same both times: it may not fill a cache "
    "(transformers: use_cache=False), nor draw random numbers other than by torch's generators. "
    "Change that, or leave recompute out."
)


Contexts = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class ActivationCheckpointing:
    """The division of a stage's layers into segments.

    With "sqrt", a segment has the square root of the number of a stage's layers, rounded up, so
    that about as many inputs are saved as layers are recomputed at a time (Chen et al., 2016, arXiv
    1604.06174), as in AxoNN: 9 layers form 3 segments of 3.
    """

    every: int | Literal["sqrt"]
    device: torch.device

    def begins_segment(self, position: int, layers: int) -> bool:
        """Whether a segment begins with the layer at ``position`` of a stage of ``layers``."""
        length = isqrt(layers - 1) + 1 if self.every == "sqrt" else self.every
        return position % length == 0


def without_reentrant_checkpoints() -> AbstractContextManager[None]:
    """Let the user's reentrant checkpoints be non-reentrant ones, which give the same numbers.

    A reentrant one around a layer of another stage would call this layer in its backward pass. If
    no argument has a graph, there is no such pass, and its parameters get no gradient.
    """
    own: Callable[..., Any] = CheckpointFunction.apply

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
            return own(function, preserve_rng_state, *args)
        return checkpoint(
            function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )

    return patched(CheckpointFunction, "apply", staticmethod(apply))


@dataclass(frozen=True)
class _PreviousOutput:
    """An input that is an output of the layer before: its index among the output's leaves."""

    leaf: int


@dataclass(frozen=True)
class _SavedInput:
    """An input, without its graph, and its version when the layer was called."""

    tensor: Tensor
    requires_grad: bool
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _SavedInput:
        return cls(tensor.detach(), tensor.requires_grad, version_of(tensor))

    def again(self, name: str) -> Tensor:
        """Return the input as a leaf of a new graph."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                f"An input of layer {name!r}, of shape {tuple(self.tensor.shape)}, was changed in "
                "place, by the layer itself or after its call, so the layer cannot be recomputed. "
                "Change a copy, or leave recompute out." + see("recomputing")
            )
        return self.tensor.detach().requires_grad_(self.requires_grad)


class _GlobalState:
    """The global state that a layer depends on: random generators, autocast, default dtype."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._device = device
        self._dtype = torch.get_default_dtype()
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state inside the context."""
        torch.set_rng_state(self._generator)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)
        try:
            with ExitStack() as stack:
                for kind, lower, enabled in self._autocasts:
                    stack.enter_context(torch.autocast(kind, lower, enabled))
                yield
        finally:
            torch.set_default_dtype(dtype)


@dataclass(frozen=True)
class _Call:
    """A call of a layer in the first pass."""

    name: str
    compute: Callable[..., Any]
    inputs: Any
    state: _GlobalState
    remembered: Contexts
    buffers: list[Tensor]
    changed: list[tuple[nn.Module, str, Tensor]]
    """The owner and the name of each buffer that the first pass has changed, and a copy from before
    it.
    """

    def again(self, previous_outputs: list[Any]) -> Any:
        """Compute the layer again."""

        def restore(leaf: Any) -> Any:
            if isinstance(leaf, _PreviousOutput):
                return previous_outputs[leaf.leaf]
            return leaf.again(self.name) if isinstance(leaf, _SavedInput) else leaf

        args, kwargs = tree_map(restore, self.inputs)
        try:
            with self.state.restored(), self._buffers_before(), self.remembered():
                return self.compute(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(
                f"Layer {self.name!r} was computed once, but recomputing it for backward raised "
                f"{type(error).__name__}: {without_link(error)}. {_SAME_BOTH_TIMES}"
                + see("recomputing")
            ) from error

    @contextmanager
    def _buffers_before(self) -> Iterator[None]:
        present = [owner._buffers[name] for owner, name, _ in self.changed]
        for owner, name, before in self.changed:
            owner._buffers[name] = before
        try:
            yield
        finally:
            for (owner, name, _), buffer in zip(self.changed, present, strict=True):
                owner._buffers[name] = buffer


class Segment:
    """Consecutive layers of one micro-batch that are computed a second time in backward.

    The second pass begins with the same buffers and states of torch's generators, and changes
    neither.

    Args:
        device: device of the layers.
        remember: called with a layer before it is computed; returns a function that makes a context
            in which the layer has its present attributes, and after which its changes are undone.
    """

    def __init__(
        self,
        device: torch.device,
        remember: Callable[[nn.Module], Contexts] = lambda layer: nullcontext,
    ) -> None:
        self._device, self._remember = device, remember
        self._calls: list[_Call] = []
        self._outputs: list[tuple[weakref.ref[Tensor], int] | None] = []
        self._shapes: list[torch.Size] = []
        self._recomputed: dict[int, Tensor] = {}
        self._computing: dict[int, Tensor] = {}
        """What the layer that is computed now has saved: it may run a backward pass of its own."""
        self._collectives = CollectiveResults()

    def run(
        self,
        name: str,
        layer: nn.Module,
        compute: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Compute the next layer of the segment without the tensors that autograd saves."""
        inputs = tree_map_only(Tensor, self._saved_input, (args, dict(kwargs)))
        state, remembered = _GlobalState(self._device), self._remember(layer)
        objects = [(each, _attributes(each)) for each in tree_leaves((args, dict(kwargs)))]
        buffers = _buffers(layer)
        copies = [(version_of(each), each.detach().clone()) for _, _, each in buffers]
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with saved, self._collectives.recorded():
            output = compute(*args, **kwargs)
        self._computing.clear()
        written = [each for each, before in objects if not _same(_attributes(each), before)]
        if written:
            raise MisconfigurationException(
                f"Layer {name!r} changes attributes of a {type(written[0]).__name__} that it is "
                "given, so it cannot be recomputed from what it was given. Return a new object, or "
                "leave recompute out." + see("recomputing")
            )
        changed = [
            (owner, each, before)
            for (owner, each, buffer), (version, before) in zip(buffers, copies, strict=True)
            if owner._buffers.get(each) is not buffer or version_of(buffer) != version
        ]
        self._calls.append(
            _Call(name, compute, inputs, state, remembered, list(layer.buffers()), changed)
        )
        self._outputs = [
            (weakref.ref(leaf), version_of(leaf)) if isinstance(leaf, Tensor) else None
            for leaf in tree_leaves(output)
        ]
        return output

    def _saved_input(self, tensor: Tensor) -> _PreviousOutput | _SavedInput:
        for index, output in enumerate(self._outputs):
            # The second pass could not compute a tensor that was changed in place since.
            if output is not None and output[0]() is tensor and output[1] == version_of(tensor):
                return _PreviousOutput(index)
        return _SavedInput.of(tensor)

    def _pack(self, tensor: Tensor) -> int:
        index = len(self._shapes)
        self._shapes.append(tensor.shape)
        self._computing[index] = tensor.detach()
        return index

    def _unpack(self, index: int) -> Tensor:
        if index in self._computing:
            return self._computing[index]
        if index not in self._recomputed:
            self._recompute()
        return self._recomputed.pop(index)

    def _recompute(self) -> None:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        buffers = [buffer.data for call in self._calls for buffer in call.buffers]
        values = [buffer.clone() for buffer in buffers]
        devices = [self._device] if self._device.type == "cuda" else []
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__)
        again = self._collectives.replayed()
        with torch.random.fork_rng(devices), torch.enable_grad(), hooks, again:
            outputs: list[Any] = []
            for call in self._calls:
                outputs = tree_leaves(call.again(outputs))
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
        self._check([tensor.shape for tensor in saved])
        self._recomputed = dict(enumerate(saved))

    def _check(self, shapes: list[torch.Size]) -> None:
        if shapes == self._shapes:
            return
        names = [call.name for call in self._calls]
        raise RuntimeError(
            f"Layers {names} saved {len(self._shapes)} tensors for backward and, recomputed, "
            f"{len(shapes)}, or of other shapes. {_SAME_BOTH_TIMES}" + see("recomputing")
        )


def _buffers(layer: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the owner, the name and the tensor of each buffer of a layer."""
    return [
        (owner, name, buffer)
        for owner in layer.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that is given to a layer; none of a tensor or module."""
    return {} if isinstance(value, Tensor | nn.Module) else dict(getattr(value, "__dict__", {}))


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(map(operator.is_, one.values(), other.values()))
