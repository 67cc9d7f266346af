"""Converts optimizer state between dense and sparse parameters, and tests whether it can be.

Includes the master weights: float32 values of a sparse weight whose dense form has fewer bits,
which checkpoints hold as an entry of the optimizer state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from lightning_axosparse.sparse.module.parameters import (
    OwnedParameter,
    owned_parameters,
    set_values,
)
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.troubleshooting import see, without_link

MASTER = "master"
"""Key of a parameter's master weights in its optimizer state."""


def convert_state(
    state: Mapping[str, Any], shape: torch.Size, convert: Callable[[Tensor], Any]
) -> dict[str, Any]:
    """Return a parameter's optimizer state with the tensors of a shape converted, and no others."""
    return {
        key: convert(value) if isinstance(value, Tensor) and value.shape == shape else value
        for key, value in state.items()
    }


_shapes_before: Any = WeakIdKeyDictionary()
"""Parameter -> its shape before its last conversion."""


@cache
def _watch_fused_optimizers() -> None:
    register_optimizer_step_pre_hook(_validate_fused_state)


def _validate_fused_state(optimizer: Optimizer, *_: Any) -> None:
    """Check the sizes of optimizer state: fused kernels write behind the end of a smaller one."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            before = _shapes_before.get(parameter, parameter.shape)
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == before != parameter.shape:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} has {name!r} of shape {tuple(value.shape)} "
                        f"for a parameter of shape {tuple(parameter.shape)}. Give the optimizer "
                        "to sparsify(module, masks, optimizer) and densify(module, optimizer), "
                        "which convert its state." + see("sparse-storage")
                    )


def convert_parameter(
    parameter: nn.Parameter, optimizers: Iterable[Optimizer], convert: Callable[[Tensor], Tensor]
) -> None:
    """Convert a parameter's values, its gradient, and what has its shape in optimizer state."""
    _watch_fused_optimizers()
    _shapes_before[parameter] = parameter.shape
    shape, gradient = parameter.shape, parameter.grad
    if gradient is not None:
        gradient = convert(gradient)
    set_values(parameter, convert(parameter.detach()), gradient)
    for optimizer in optimizers:
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            state.update(convert_state(state, shape, convert))


def compress_state(state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Compress the tensors of one parameter's optimizer state that have its dense shape.

    Args:
        state: ``optimizer.state[parameter]``, or the entry of an optimizer's state dict, of a dense
            parameter.
        layout: the parameter's layout.
    """
    return convert_state(state, layout.shape, lambda value: layout.to(value.device).compress(value))


def expand_state(state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Densify the tensors of unpruned entries: the inverse of :func:`compress_state`."""
    shape = torch.Size([layout.nnz])
    return convert_state(state, shape, lambda value: layout.to(value.device).densify(value))


def validate_state(name: str, state: Mapping[str, Any], shape: torch.Size) -> None:
    """Check that each tensor of optimizer state is a single number or elementwise.

    Raises:
        ValueError: naming the parameter and the entry that cannot be compressed.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
            raise ValueError(
                f"Optimizer state '{key}' of parameter '{name}' has shape {tuple(value.shape)}, "
                f"the parameter {tuple(shape)}: it cannot be reduced to the unpruned entries. Use "
                "an elementwise optimizer such as AdamW or SGD." + see("optimizers")
            )


@contextmanager
def dense_shapes(module: nn.Module) -> Iterator[list[Optimizer]]:
    """Give sparsely stored parameters their dense shapes for a while, without the memory.

    ``configure_optimizers`` often tells matrices, which decay, from vectors, which do not, by their
    number of dimensions. Inside the context only shapes may be read, no entries.

    Args:
        module: the model, dense or (in part) stored sparse.

    Yields:
        A list for the optimizers that are created inside: their initial state is compressed at
        exit.
    """
    stored = [
        (entry.parameter, entry.parameter.detach(), entry.layout)
        for entry in owned_parameters(module)
        if entry.layout is not None
    ]
    for parameter, values, layout in stored:
        set_values(parameter, values.new_zeros(()).expand(layout.shape), None)
    optimizers: list[Optimizer] = []
    try:
        yield optimizers
    finally:
        for parameter, values, layout in stored:
            set_values(parameter, values, None)
            for optimizer in optimizers:
                if parameter in optimizer.state:
                    state = optimizer.state[parameter]
                    state.update(compress_state(state, layout))


def master_values(value: Tensor, master: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return master weights: ``master`` where it still rounds to ``value``, else ``value`` itself.

    The rounded values may have changed since ``master`` was rounded to them.

    Args:
        value: the rounded values.
        master: the values that they were rounded from, of ``dtype``; None if there are none.
        dtype: float32, or wider.
    """
    wide = value.to(dtype)
    return wide if master is None else torch.where(master.to(value.dtype) == value, master, wide)


def with_master(entry: OwnedParameter, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizer state of a sparsely stored parameter as checkpoints hold it, compressed.

    It includes the master weights if the weight in its own dtype does not hold all their bits.
    """
    assert entry.form is not None
    values = entry.parameter.detach()
    if torch.equal(values.to(entry.form.dtype).to(values.dtype), values):
        return state
    return {**state, MASTER: values}


def restore_masters(optimizer: Optimizer, entries: Iterable[OwnedParameter]) -> None:
    """Move the master weights in an optimizer's loaded state to the sparsely stored parameters."""
    for entry in entries:
        parameter, form = entry.parameter, entry.form
        assert form is not None
        if MASTER in optimizer.state.get(parameter, {}):
            master = optimizer.state[parameter].pop(MASTER).to(parameter.device)
            with torch.no_grad():
                rounded = parameter.to(form.dtype)
                parameter.copy_(master_values(rounded, master, parameter.dtype))


_TRIAL_LR = 1e-2


def validate_elementwise_optimizers(optimizer: Optimizer) -> None:
    """Check that an optimizer updates a matrix as it updates the vector of its entries.

    A pruned matrix is stored as the vector of its unpruned entries, so the optimizer must not use
    rows and columns. A copy of the optimizer, with its class and settings, takes a few steps on a
    small random matrix and on the same numbers as a vector; the optimizer itself does not change.

    Raises:
        MisconfigurationException: if the results differ or a step fails, as for Adafactor, Muon,
            Shampoo, LBFGS and SparseAdam.
    """
    for group in optimizer.param_groups:
        matrix = next((p for p in group["params"] if p.dim() >= 2 and not p.is_meta), None)
        if matrix is None:
            continue
        try:
            numbers = _random_numbers(4, 6).to(matrix.device, matrix.dtype)
            as_matrix, as_vector = (
                _stepped(optimizer, group, [[tensor] for tensor in shaped])
                for shaped in (numbers, numbers.flatten(1))
            )
        except Exception as error:
            raise _not_elementwise(
                optimizer, f"a trial step failed: {without_link(error)}"
            ) from error
        if not torch.allclose(as_matrix, as_vector):
            raise _not_elementwise(
                optimizer, "it updates a matrix otherwise than the vector of its entries"
            )


def trial_copy(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """Copy an optimizer, with the settings of ``group`` and no hooks, for other parameters.

    The learning rate is set, because a warm-up schedule may start at zero.
    """
    settings = {**group, "params": list(parameters)}
    if settings.get("lr") is not None:
        settings["lr"] = settings["lr"] * 0 + _TRIAL_LR
    without_hooks = vars(SGD(parameters, lr=0.0))
    copy = type(optimizer).__new__(type(optimizer))
    vars(copy).update({**vars(optimizer), **without_hooks, "defaults": optimizer.defaults})
    copy.param_groups = [settings]
    copy.state = defaultdict(dict)
    with suppress(TypeError, ValueError):  # where the constructor wants other arguments
        copy.state = type(optimizer)(parameters, **optimizer.defaults).state
    return copy


def trial_state(
    optimizer: Optimizer, group: Mapping[str, Any], shape: Sequence[int]
) -> Mapping[str, Any]:
    """Return the state that a trial optimizer has of a parameter of this shape after one step."""
    device = next((p.device for p in group["params"] if not p.is_meta), torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(shape, device=device))
    trial = trial_copy(optimizer, group, [parameter])
    parameter.grad = torch.ones_like(parameter)
    type(trial).step(trial)
    state: Mapping[str, Any] = trial.state[parameter]
    return state


def trial_steps(optimizer: Optimizer, group: Mapping[str, Any], in_parts: bool) -> Tensor:
    """Return the entries of two small random parameters after a few steps of a trial optimizer.

    Args:
        optimizer: the optimizer to copy.
        group: the settings to copy.
        in_parts: whether halves of the parameters, as vectors, have optimizers of their own.
    """

    def split(numbers: Tensor) -> list[Tensor]:
        return [half for p in numbers for half in p.flatten().chunk(2)] if in_parts else [*numbers]

    numbers = list(map(split, _random_numbers(2, 3, 5)))
    return _stepped(optimizer, group, numbers, alone=in_parts)


def _random_numbers(*shape: int) -> Tensor:
    """Return numbers for parameters of a shape, and for their gradients in three steps."""
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    numbers: Sequence[Sequence[Tensor]],
    alone: bool = False,
) -> Tensor:
    """Return the entries of parameters, the first of ``numbers``, after steps by the others.

    Each is stepped by an optimizer of its own if it is ``alone``.
    """
    values, *gradients = numbers
    parameters = [nn.Parameter(value.clone()) for value in values]
    together = [[parameter] for parameter in parameters] if alone else [parameters]
    trials = [trial_copy(optimizer, group, members) for members in together]
    device = parameters[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # some optimizers add noise
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            for trial in trials:
                type(trial).step(trial)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _not_elementwise(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot train sparse weights: {reason}. A pruned weight is "
        "stored as the vector of its unpruned entries, so the optimizer must be elementwise: use "
        "AdamW, Adam, SGD, RMSprop, NAdam, Adagrad or the like." + see("optimizers")
    )
