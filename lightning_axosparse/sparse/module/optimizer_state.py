"""Converts optimizer state between dense parameters and their kept entries.

Includes the master weights: float32 kept values of a weight whose dense form has fewer bits, which
checkpoints hold as an entry of the optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.sparse.module.parameters import (
    OwnedParameter,
    owned_parameters,
    set_values,
)
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.support.troubleshooting import see

MASTER = "master"
"""Key of a parameter's master weights in its optimizer state."""


def compress_state(
    state: Mapping[str, Any], layout: Layout, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Compress the tensors of one parameter's optimizer state that have its dense shape.

    Args:
        state: what ``optimizer.state[parameter]`` or the ``state`` of an optimizer's state dict
            holds for a dense parameter. Other entries (``step``) stay as they are.
        layout: the parameter's kept entries.
        dtype: dtype of the compressed tensors; None keeps theirs.
    """
    return {
        key: layout.to(value.device).compress(value).to(dtype or value.dtype)
        if isinstance(value, Tensor) and value.shape == layout.shape
        else value
        for key, value in state.items()
    }


def expand_state(
    state: Mapping[str, Any], layout: Layout, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Make tensors of kept entries dense: the inverse of :func:`compress_state`."""
    return {
        key: layout.to(value.device).densify(value.to(dtype or value.dtype))
        if isinstance(value, Tensor) and value.shape == (layout.nnz,)
        else value
        for key, value in state.items()
    }


def validate_state(name: str, state: Mapping[str, Any], shape: torch.Size) -> None:
    """Check that each tensor of optimizer state is a single number or elementwise.

    Raises:
        ValueError: naming the parameter and the entry that cannot be compressed.
    """
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != shape:
            raise ValueError(
                f"Optimizer state '{key}' of parameter '{name}' has shape {tuple(value.shape)}, "
                f"the parameter {tuple(shape)}: it cannot be reduced to the kept entries. Use an "
                "elementwise optimizer such as AdamW or SGD." + see("optimizers")
            )


@contextmanager
def dense_shapes(module: nn.Module) -> Iterator[list[Optimizer]]:
    """Give sparsely stored parameters their dense shapes for a while, without the memory.

    ``configure_optimizers`` often tells matrices, which decay, from vectors, which do not, by their
    number of dimensions. Inside the context only shapes may be read, no entries.

    Args:
        module: the model, dense or (in part) stored sparse.

    Yields:
        A list to append the optimizers made inside to: their initial state is compressed at exit.
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


def master_values(value: Tensor, kept: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return master weights: ``kept`` where it still rounds to ``value``, else ``value`` itself.

    The rounded values may have changed since they were made from ``kept``.

    Args:
        value: the rounded values.
        kept: the values that they were rounded from, of ``dtype``; None if there are none.
        dtype: float32, or wider.
    """
    wide = value.to(dtype)
    return wide if kept is None else torch.where(kept.to(value.dtype) == value, kept, wide)


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
            kept = optimizer.state[parameter].pop(MASTER).to(parameter.device)
            with torch.no_grad():
                rounded = parameter.to(form.dtype)
                parameter.copy_(master_values(rounded, kept, parameter.dtype))
