"""Finds the dimensions of input and output channels in layers, and removes channels in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.sparse.module.elementwise import trial_copy
from lightning_axosparse.sparse.module.optimizer_state import validate_state
from lightning_axosparse.sparse.module.parameters import set_values


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

_PER_CHANNEL = ("weight", "bias", "running_mean", "running_var")


def layer_inputs(layer: nn.Module) -> int:
    """Return the number of inputs, or input channels, of a layer in :data:`WEIGHTED`."""
    return int(getattr(layer, WEIGHTED[type(layer)].inputs))


def layer_outputs(layer: nn.Module) -> int:
    """Return the number of outputs, or channels, of a weighted layer or a BatchNorm."""
    if type(layer) in BATCH_NORMS:
        return int(layer.num_features)  # type: ignore[arg-type]
    return int(getattr(layer, WEIGHTED[type(layer)].outputs))


def keep_inputs(layer: nn.Module, kept: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove inputs of a layer, its optimizer state with them.

    Args:
        layer: of a type in :data:`WEIGHTED`; it may be on the meta device.
        kept: bool, True for each input that stays.
        optimizers: those that may hold its parameters.
    """
    places = WEIGHTED[type(layer)]
    _keep(layer, "weight", places.input_dimension, kept, optimizers)
    setattr(layer, places.inputs, int(kept.sum()))


def keep_outputs(layer: nn.Module, kept: Tensor, optimizers: Iterable[Optimizer]) -> None:
    """Remove outputs of a weighted layer, or channels of a BatchNorm; arguments as above."""
    if type(layer) in BATCH_NORMS:
        for name in _PER_CHANNEL:
            _keep(layer, name, 0, kept, optimizers)
        layer.num_features = int(kept.sum())  # type: ignore[assignment]
    else:
        places = WEIGHTED[type(layer)]
        _keep(layer, "weight", places.output_dimension, kept, optimizers)
        _keep(layer, "bias", 0, kept, optimizers)
        setattr(layer, places.outputs, int(kept.sum()))


def validate_channelwise_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer's state has one entry for each entry of a weight.

    A copy of the optimizer takes a trial step; the optimizer itself does not change.

    Raises:
        ValueError: naming the entry of the state, as for Adafactor.
    """
    for group in optimizer.param_groups:
        weight = nn.Parameter(torch.ones(3, 2, 2, 2))
        trial = trial_copy(optimizer, group, [weight])
        weight.grad = torch.ones_like(weight)
        type(trial).step(trial)
        validate_state("any weight", trial.state[weight], weight.shape)


def _keep(
    layer: nn.Module, name: str, dimension: int, kept: Tensor, optimizers: Iterable[Optimizer]
) -> None:
    """Remove entries of a parameter or buffer, if there is one, which stays the same object."""
    tensor: Tensor | None = getattr(layer, name)
    if tensor is None:
        return
    index = kept.nonzero()[:, 0]
    if not isinstance(tensor, nn.Parameter):
        tensor.set_(_selected(tensor, dimension, index))  # type: ignore[call-overload]
        return
    for optimizer in optimizers:
        if tensor in optimizer.state:
            state = optimizer.state[tensor]
            state.update(_selected_state(state, tensor.shape, dimension, index))
    gradient = None if tensor.grad is None else _selected(tensor.grad, dimension, index)
    set_values(tensor, _selected(tensor.detach(), dimension, index), gradient)


def _selected(tensor: Tensor, dimension: int, index: Tensor) -> Tensor:
    return tensor.index_select(dimension, index.to(tensor.device))


def _selected_state(
    state: Mapping[str, Any], shape: torch.Size, dimension: int, index: Tensor
) -> dict[str, Any]:
    return {
        key: _selected(value, dimension, index)
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for key, value in state.items()
    }
