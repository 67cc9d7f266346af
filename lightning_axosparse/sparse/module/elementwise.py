"""Tests whether an optimizer updates a matrix as the vector of its entries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_axosparse.support.troubleshooting import see, without_link

_TRIAL_LR = 1e-2


def validate_elementwise_optimizers(optimizer: Optimizer) -> None:
    """Check that an optimizer updates a matrix as it updates the vector of its entries.

    A pruned matrix is stored as the vector of its kept entries, so the optimizer must not use rows
    and columns. A copy of the optimizer, with its class and settings, takes a few steps on a small
    random matrix and on the same numbers as a vector; the optimizer itself does not change.

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
                _stepped(optimizer, group, [[each] for each in shaped])
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


def trial_steps(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    in_parts: bool = False,
    prepare: Callable[[Optimizer], None] = lambda _: None,
) -> Tensor:
    """Return the entries of two small random parameters after a few steps of a trial optimizer.

    Args:
        optimizer: the optimizer to copy.
        group: the settings to copy.
        in_parts: halves of the parameters, as vectors, are parameters of their own.
        prepare: called with the trial optimizer before it steps.
    """

    def split(numbers: Tensor) -> list[Tensor]:
        return [half for p in numbers for half in p.flatten().chunk(2)] if in_parts else [*numbers]

    return _stepped(optimizer, group, list(map(split, _random_numbers(2, 3, 5))), prepare)


def _random_numbers(*shape: int) -> Tensor:
    """Return numbers for parameters of a shape, and for their gradients in three steps."""
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))


def _stepped(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    numbers: Sequence[Sequence[Tensor]],
    prepare: Callable[[Optimizer], None] = lambda _: None,
) -> Tensor:
    """Return the entries of parameters, the first of ``numbers``, after steps by the others."""
    values, *gradients = numbers
    parameters = [nn.Parameter(each.clone()) for each in values]
    trial = trial_copy(optimizer, group, parameters)
    prepare(trial)
    device = parameters[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)  # some optimizers add noise
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            type(trial).step(trial)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _not_elementwise(optimizer: Optimizer, reason: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{type(optimizer).__name__} cannot train sparse weights: {reason}. A pruned weight is "
        "stored as the vector of its kept entries, so the optimizer must be elementwise: use "
        "AdamW, Adam, SGD, RMSprop, NAdam, Adagrad or the like." + see("optimizers")
    )
