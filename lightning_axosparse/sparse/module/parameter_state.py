"""Copies a parameter's values, layout and optimizer state, to send them to another rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.sparse.module.parameters import Owner, set_values
from lightning_axosparse.sparse.module.sparse_module import SparseModule, forget_layout, make_sparse
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParameterState:
    """One parameter's values, optimizer state and, if it is stored sparse, layout; on CPU.

    Attributes:
        values: the values, of the dense shape or only the kept ones.
        layout: the kept entries; None for a dense parameter.
        form: the dense form; None for a dense parameter. Its resident copy is not pickled.
        state: per optimizer, by its index, each entry of its state of the parameter, and whether
            that lies on the device; the ``step`` of most optimizers does not.
    """

    values: Tensor
    layout: Layout | None
    form: DenseForm | None
    state: dict[int, dict[str, tuple[Any, bool]]]


def pack(
    parameter: nn.Parameter, owners: Sequence[Owner], optimizers: Iterable[Optimizer]
) -> ParameterState:
    """Copy a parameter's state to CPU."""
    module, name = owners[0]
    layout = form = None
    if isinstance(module, SparseModule) and name in module._layouts:
        layout, form = module._layouts[name].to(_CPU), module._forms[name]
    state = {
        index: {
            key: (_copy(value), isinstance(value, Tensor) and not value.is_cpu)
            for key, value in optimizer.state[parameter].items()
        }
        for index, optimizer in enumerate(optimizers)
        if parameter in optimizer.state
    }
    return ParameterState(_copy(parameter), layout, form, state)


def unpack(
    packed: ParameterState,
    parameter: nn.Parameter,
    owners: Iterable[Owner],
    optimizers: Iterable[Optimizer],
    device: torch.device,
) -> None:
    """Restore on ``device`` a parameter whose state was dropped, and make its owners read it."""
    set_values(parameter, packed.values.to(device), None)
    for index, optimizer in enumerate(optimizers):
        if index in packed.state:
            optimizer.state[parameter] = {
                key: value.to(device) if on_device else value
                for key, (value, on_device) in packed.state[index].items()
            }
    if packed.layout is not None and packed.form is not None:
        layout = packed.layout.to(device)
        for module, name in owners:
            make_sparse(module, name, layout, packed.form)


def forget(
    parameter: nn.Parameter, owners: Iterable[Owner], optimizers: Iterable[Optimizer]
) -> None:
    """Drop a parameter's optimizer state and layout; its values stay with the caller."""
    for optimizer in optimizers:
        optimizer.state.pop(parameter, None)
    for module, name in owners:
        if isinstance(module, SparseModule) and name in module._layouts:
            forget_layout(module, name)


def _copy(value: Any) -> Any:
    # With storage of its own: pickling a view would send the whole tensor that it is a view of.
    return value.detach().to(_CPU, copy=True) if isinstance(value, Tensor) else value
