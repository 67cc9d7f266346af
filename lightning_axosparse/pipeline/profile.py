"""Profile: how long each layer takes, forward and back, on the inputs that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_REPEATS = 5

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def layer_seconds(
    layers: Mapping[str, nn.Module],
    forward: Callable[[], Any],
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> list[float]:
    """Time each layer; the fastest of a few passes counts, which no other process slowed.

    Weights, buffers and random generators are left as they were. No more than one layer is on
    ``device`` at a time.

    Args:
        layers: name -> layer, on CPU.
        forward: runs the network that calls the layers, on CPU.
        context: precision of the forward pass.
        device: where the layers are timed.

    Returns:
        Seconds of one forward and backward pass of each layer.

    Raises:
        MisconfigurationException: if ``forward`` does not call a layer.
    """
    buffers = [(b, b.clone()) for layer in layers.values() for b in layer.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        with context(), torch.no_grad():
            inputs = _inputs(layers, forward)
        seconds = []
        for name, layer in layers.items():
            layer.to(device)
            given = pytree.tree_map_only(Tensor, lambda t: t.to(device), inputs[name])
            passes = [_pass(layer, given, context, device) for _ in range(1 + _REPEATS)]
            seconds.append(min(passes[1:]))
            layer.to("cpu")
    for buffer, value in buffers:
        buffer.data.copy_(value)
    return seconds


def _inputs(layers: Mapping[str, nn.Module], forward: Callable[[], Any]) -> dict[str, Inputs]:
    inputs: dict[str, Inputs] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[name] = args, kwargs

        return hook

    with ExitStack() as stack:
        for name, layer in layers.items():
            handle = layer.register_forward_pre_hook(note(name), with_kwargs=True)
            stack.callback(handle.remove)
        forward()
    missing = [name for name in layers if name not in inputs]
    if missing:
        raise MisconfigurationException(
            f"balance='time' runs the module on its example_input_array, but that did not call "
            f"layer {missing[0]!r}. Let `forward` call every layer, or use balance='parameters'."
        )
    return inputs


def _pass(
    layer: nn.Module,
    inputs: Inputs,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> float:
    args, kwargs = pytree.tree_map_only(Tensor, _leaf, inputs)
    began = _now(device)
    with context(), torch.enable_grad():
        output = layer(*args, **kwargs)
    _differentiate(pytree.tree_leaves(output), pytree.tree_leaves((args, kwargs)), layer)
    return _now(device) - began


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _differentiate(outputs: Sequence[Any], inputs: Sequence[Any], layer: nn.Module) -> None:
    ends = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    starts = [t for t in [*inputs, *layer.parameters()] if isinstance(t, Tensor)]
    wanted = [tensor for tensor in starts if tensor.requires_grad]
    if ends and wanted:
        ones = [torch.ones_like(tensor) for tensor in ends]
        torch.autograd.grad(ends, wanted, ones, allow_unused=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()
