"""Parcel: all that training keeps of one parameter, as it travels from one rank to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.module import SparseModule, forget_layout, make_sparse
from lightning_axosparse.sparse.reading import Reading

_CPU = torch.device("cpu")

Owner = tuple[nn.Module, str]
"""A module and the name of the attribute by which it has a parameter."""


@dataclass(frozen=True)
class Parcel:
    """A parameter's values, its optimizer state and, if sparse, how it is stored and read; on CPU.

    Attributes:
        values: the values: of the dense shape, or the kept ones alone.
        layout: which entries are kept; None for a dense parameter.
        reading: how it is read; None for a dense parameter. Its resident copy is not sent.
        state: per optimizer, by its index, the entries of its state of the parameter, and whether
            they lie on the device, as the ``step`` of most optimizers does not.
    """

    values: Tensor
    layout: Layout | None
    reading: Reading | None
    state: dict[int, dict[str, tuple[Any, bool]]]


def pack(
    parameter: nn.Parameter, owners: Sequence[Owner], optimizers: Iterable[Optimizer]
) -> Parcel:
    """Copy what there is of a parameter."""
    module, name = owners[0]
    layout = reading = None
    if isinstance(module, SparseModule) and name in module._layouts:
        layout, reading = module._layouts[name].to(_CPU), module._readings[name]
    state = {
        index: {
            key: (_copy(value), isinstance(value, Tensor) and not value.is_cpu)
            for key, value in optimizer.state[parameter].items()
        }
        for index, optimizer in enumerate(optimizers)
        if parameter in optimizer.state
    }
    return Parcel(_copy(parameter), layout, reading, state)


def unpack(
    parcel: Parcel,
    parameter: nn.Parameter,
    owners: Iterable[Owner],
    optimizers: Iterable[Optimizer],
    device: torch.device,
) -> None:
    """Fill an emptied parameter in, on ``device``, and let its owners read it as it is stored."""
    parameter.data = torch.empty(0, dtype=parcel.values.dtype, device=device)
    with torch.no_grad():
        # Not ``.data =``: the node that accumulates the gradient would expect the former shape.
        parameter.set_(parcel.values.to(device))  # type: ignore[call-overload]
    for index, optimizer in enumerate(optimizers):
        if index in parcel.state:
            optimizer.state[parameter] = {
                key: value.to(device) if on_device else value
                for key, (value, on_device) in parcel.state[index].items()
            }
    if parcel.layout is not None and parcel.reading is not None:
        layout = parcel.layout.to(device)
        for module, name in owners:
            make_sparse(module, name, layout, parcel.reading)


def forget(
    parameter: nn.Parameter, owners: Iterable[Owner], optimizers: Iterable[Optimizer]
) -> None:
    """Drop the optimizer state of a parameter, and its owners' way to read it as sparse."""
    for optimizer in optimizers:
        optimizer.state.pop(parameter, None)
    for module, name in owners:
        if isinstance(module, SparseModule) and name in module._layouts:
            forget_layout(module, name)


def _copy(value: Any) -> Any:
    # A copy of its own storage, for a view would be sent with all that it is a view of.
    return value.detach().to(_CPU, copy=True) if isinstance(value, Tensor) else value
