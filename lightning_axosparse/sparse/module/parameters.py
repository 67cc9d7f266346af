"""Lists a module's parameters with their owners, replaces their values, packs and counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.gradient_reducer import DividedGradient
from lightning_axosparse.sparse.module.sparse_module import (
    SparseModule,
    SparseStorage,
    forget_layout,
    make_sparse,
)
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.support.torch_internals import storage_id, tensors_in
from lightning_axosparse.support.troubleshooting import see

Owner = tuple[nn.Module, str]
"""A module, and the name of the attribute by which it has a parameter."""


@dataclass
class OwnedParameter:
    """A parameter and the modules that own it; a tied parameter has several.

    Attributes:
        parameter: the parameter.
        names: its names in the root module, the first as in ``named_parameters()``.
        owners: the modules that have it as an attribute.
    """

    parameter: nn.Parameter
    names: list[str]
    owners: list[Owner]

    @property
    def stored(self) -> SparseStorage | None:
        """How it is stored sparse; None while it is dense."""
        owner, attribute = self.owners[0]
        return owner._stored.get(attribute) if isinstance(owner, SparseModule) else None

    @property
    def layout(self) -> Layout | None:
        """The layout of its values; None while it is dense."""
        return self.stored and self.stored.layout

    @property
    def form(self) -> DenseForm | None:
        """Its dense form; None while it is dense."""
        return self.stored and self.stored.form

    @property
    def shape(self) -> torch.Size:
        """Its dense shape: that of the full parameter, where this rank has a part."""
        local = self.parameter.shape if self.layout is None else self.layout.shape
        return self.whole_shape or local

    @property
    def whole_shape(self) -> torch.Size | None:
        """The dense shape of the full parameter; None where this rank has all of it."""
        return vars(self.parameter).get("whole_shape")

    @whole_shape.setter
    def whole_shape(self, shape: torch.Size | None) -> None:
        vars(self.parameter)["whole_shape"] = shape

    def read_as(self, layout: Layout, form: DenseForm) -> None:
        """Let all owners read its values as a weight of this layout, in one dense form."""
        for owner, attribute in self.owners:
            make_sparse(owner, attribute, layout, form)

    def dense(self) -> Tensor:
        """Return a dense copy of its values, in the dtype of its dense form."""
        assert self.stored is not None
        layout, form = self.stored
        return layout.densify(self.parameter.detach().to(form.dtype))


def dense_copy(parameter: nn.Parameter, stored: SparseStorage) -> nn.Parameter:
    """Return a dense copy of a sparse parameter with its gradient, if that is a plain tensor."""
    layout, form = stored

    def dense(values: Tensor) -> Tensor:
        return layout.densify(values.detach().to(form.dtype))

    copy = nn.Parameter(dense(parameter), parameter.requires_grad)
    if type(parameter.grad) is Tensor:
        copy.grad = dense(parameter.grad)
    return copy


def owned_parameters(module: nn.Module) -> list[OwnedParameter]:
    """Return every parameter of ``module`` once, in module order."""
    owned: dict[int, OwnedParameter] = {}
    for prefix, submodule in module.named_modules():
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                entry = owned.setdefault(id(parameter), OwnedParameter(parameter, [], []))
                entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
                entry.owners.append((submodule, attribute))
    return list(owned.values())


def sparse_parameters(module: nn.Module) -> dict[str, OwnedParameter]:
    """Return the sparsely stored parameters, by name as in ``named_parameters()``."""
    owned = owned_parameters(module)
    return {entry.names[0]: entry for entry in owned if entry.layout is not None}


def layouts(module: nn.Module) -> dict[str, Layout]:
    """Return the layout of each sparsely stored parameter, by name as in ``named_parameters()``."""
    return {
        name: entry.layout
        for name, entry in sparse_parameters(module).items()
        if entry.layout is not None
    }


def owners(module: nn.Module) -> dict[str, list[Owner]]:
    """Return the owners of each parameter, by name as in ``named_parameters()``."""
    return {entry.names[0]: entry.owners for entry in owned_parameters(module)}


def validate_not_deferred(name: str, parameter: nn.Parameter) -> None:
    """Check that a parameter is not a deferred tensor of ``configure_model``.

    Raises:
        ValueError: if it is.
    """
    if parameter.untyped_storage().device.type == "meta" and not parameter.is_meta:
        raise ValueError(
            f"'{name}' cannot be stored sparse in `configure_model`, where it has no values yet. "
            "Give the ticket to the callback, GradualPruning(ticket=...): each rank then stores "
            "its weights sparse as it makes them." + see("layers-made-later")
        )


def set_values(parameter: nn.Parameter, values: Tensor, gradient: Tensor | None) -> None:
    """Replace the values of ``parameter``, which may have another shape, and its gradient.

    ``set_`` and not ``.data =``: it also replaces the autograd node that accumulates the gradient,
    which hooks keep alive and which would expect the former shape. ``.data =`` replaces the node
    only where dtype or device change, which ``set_`` cannot.
    """
    parameter.grad = None
    if values.dtype != parameter.dtype or values.device != parameter.device:
        parameter.data = values
    with torch.no_grad():
        parameter.set_(values)  # type: ignore[call-overload]
    parameter.grad = gradient


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class ParameterState:
    """One parameter's values, optimizer state and, if it is stored sparse, how; on CPU.

    Attributes:
        values: all values, in the dense shape, or only the unpruned ones.
        stored: how it is stored sparse, if it is. The resident copy is not pickled.
        state: per optimizer, by its index, each entry of its state of the parameter, and whether
            that lies on the device; the ``step`` of most optimizers does not.
    """

    values: Tensor
    stored: SparseStorage | None
    state: dict[int, dict[str, tuple[Any, bool]]]


def pack(
    parameter: nn.Parameter, owners: Sequence[Owner], optimizers: Iterable[Optimizer]
) -> ParameterState:
    """Copy a parameter's state to CPU."""
    stored = OwnedParameter(parameter, [], list(owners)).stored
    if stored is not None:
        stored = stored._replace(layout=stored.layout.to(_CPU))
    state = {
        index: {
            key: (_copy(value), isinstance(value, Tensor) and not value.is_cpu)
            for key, value in optimizer.state[parameter].items()
        }
        for index, optimizer in enumerate(optimizers)
        if parameter in optimizer.state
    }
    return ParameterState(_copy(parameter), stored, state)


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
    if packed.stored is not None:
        layout, form = packed.stored
        layout = layout.to(device)
        for module, name in owners:
            make_sparse(module, name, layout, form)


def forget(
    parameter: nn.Parameter, owners: Iterable[Owner], optimizers: Iterable[Optimizer]
) -> None:
    """Drop a parameter's optimizer state and layout; its values stay with the caller."""
    for optimizer in optimizers:
        optimizer.state.pop(parameter, None)
    for module, name in owners:
        if isinstance(module, SparseModule) and name in module._stored:
            forget_layout(module, name)


def _copy(value: Any) -> Any:
    # In new storage: pickling a view would send the whole tensor that it is a view of.
    return value.detach().to(_CPU, copy=True) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state by kind.

    Attributes:
        weights: the parameters.
        resident: the dense copies of sparsely stored weights (``compute="samo"``).
        indices: the positions of unpruned entries.
        gradients: the gradients.
        optimizer: the optimizer state.
    """

    weights: int
    resident: int
    indices: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.resident + self.indices + self.gradients + self.optimizer


def state_bytes(module: nn.Module, optimizer: Optimizer | None = None) -> StateBytes:
    """Return the bytes of ``module``'s parameters, their gradients and optimizer state.

    Storage that several tensors share counts once. Parameters on the meta device and buffers do not
    count.

    Args:
        module: a model, dense or (in part) stored sparse.
        optimizer: the optimizer whose state counts, if there is one.
    """
    parameters = list(module.parameters())
    stored = [entry.stored for entry in owned_parameters(module) if entry.stored is not None]
    copies = [form.copy for _, form in stored]
    counted: set[int] = set()
    return StateBytes(
        weights=_new_bytes(parameters, counted),
        resident=_new_bytes((c.dense for c in copies if c and c.dense is not None), counted),
        indices=_new_bytes((t for layout, _ in stored for t in layout.tensors.values()), counted),
        gradients=_new_bytes((p.grad for p in parameters if p.grad is not None), counted),
        optimizer=_new_bytes(
            tensors_in(list(optimizer.state.values()) if optimizer else ()),
            counted,
        ),
    )


def _new_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Return the bytes of the storages not yet in ``counted``, and add these to it."""
    total = 0
    for tensor in chain.from_iterable(map(_components, tensors)):
        storage = tensor.untyped_storage()
        if storage_id(storage) not in counted:
            counted.add(storage_id(storage))
            total += storage.nbytes()
    return total


def _components(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors of which ``tensor`` consists and that have storage."""
    if isinstance(tensor, DividedGradient):
        return (tensor.part,)
    if tensor.is_meta:
        return ()
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)
