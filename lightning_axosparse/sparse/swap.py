"""Swap: turn parameters into vectors of kept values, and back, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_axosparse.arguments import (
    MASKS,
    MODULE,
    NONE,
    OPTIMIZER,
    checked,
    one_of,
    refuse_mask,
)
from lightning_axosparse.sparse.formats import FORMATS, layout_of
from lightning_axosparse.sparse.freed import return_freed_memory
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.module import SparseModule, make_dense, make_sparse
from lightning_axosparse.sparse.optimizer import (
    check_state,
    compress_state,
    expand_state,
    refuse_matrix_optimizers,
)
from lightning_axosparse.sparse.reading import POLICIES, Policy, Reading, master_dtype
from lightning_axosparse.sparse.weight import compress_gradient


@dataclass
class Owned:
    """A parameter, its names in the root module, and the modules that have it as an attribute."""

    parameter: nn.Parameter
    names: list[str]
    owners: list[tuple[nn.Module, str]]

    @property
    def layout(self) -> Layout | None:
        """How the parameter is stored, or None while it is dense."""
        owner, attribute = self.owners[0]
        return owner._layouts.get(attribute) if isinstance(owner, SparseModule) else None

    @property
    def reading(self) -> Reading | None:
        """How the parameter is read, or None while it is dense."""
        owner, attribute = self.owners[0]
        return owner._readings.get(attribute) if isinstance(owner, SparseModule) else None


@checked(
    ValueError,
    module=MODULE,
    masks=MASKS,
    optimizer=OPTIMIZER | NONE,
    index_format=one_of(*FORMATS) | NONE,
    policy=one_of(*POLICIES),
)
def sparsify(
    module: nn.Module,
    masks: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
    index_format: str | None = None,
    policy: Policy = "sparse",
) -> None:
    """Store the named parameters of ``module`` as their kept values alone, in place.

    The parameter objects, their names and the optimizer's parameter groups stay as they are: a
    pruned parameter is then the 1-D vector of its kept values, so its gradient, its optimizer state
    and whatever is computed from them shrink with it. ``module.weight`` still reads as a tensor of
    the dense shape, and state dicts stay dense. Follows SAMO (Singh & Bhatele, IPDPS 2023), with
    the weight itself stored sparse as well. They are copies, made at each call: what is to change
    goes in through ``load_state_dict``, the parameters or ``module.weight``.

    Args:
        module: the model, or any part of it. If it is wrapped in ``DistributedDataParallel``, hand
            over the wrapper, which then reduces the kept entries alone.
        masks: parameter name, as in ``module.named_parameters()`` -> bool tensor of the
            parameter's shape, True where an entry is kept. A tied parameter may be given under
            any of its names. A parameter already stored with just this mask is left alone.
        optimizer: the optimizer that holds the parameters, if there is one; its state of them is
            compressed.
        index_format: how the places of kept entries are written down: "coo", "block", "gaps" or
            "bitmap" (``sparse/formats.py``); None takes what is fastest on the device.
        policy: "sparse": the dense weight is made, in parts, at every use and never stays; "samo":
            it stays, in the dtype that products run in, and is made once an optimizer step. The
            kept values of a weight of less than 32 bits are float32 with both.

    Raises:
        ValueError: for an argument of another type, a policy, an index format, name, shape or
            dtype that does not fit, a parameter or a mask on the meta device, a parameter that is
            stored sparse with another mask, and optimizer state that is not elementwise. Nothing
            has been changed then.
        MisconfigurationException: for an optimizer that updates a matrix otherwise than the vector
            of its entries; nothing has been changed then, either.
    """
    owned = owned_parameters(module)
    by_name = {name: entry for entry in owned for name in entry.names}
    layouts: dict[int, tuple[Owned, Layout]] = {}
    for name, mask in masks.items():
        if name not in by_name:
            close = get_close_matches(str(name), by_name, n=3, cutoff=0.4) or list(by_name)[:5]
            raise ValueError(
                f"The module has no parameter '{name}' to make sparse. Close: {', '.join(close)}."
            )
        entry = by_name[name]
        layout = _checked_layout(name, entry, mask, index_format)
        _, known = layouts.setdefault(id(entry.parameter), (entry, layout))
        if not known.same_entries(layout):
            raise ValueError(
                f"'{entry.names[0]}' and '{name}' are one tied parameter, but their masks differ. "
                "Give one mask."
            )
        if optimizer is not None and entry.layout is None:
            check_state(name, optimizer.state.get(entry.parameter, {}), entry.parameter.shape)
    if optimizer is not None:
        refuse_matrix_optimizers(optimizer)
    for entry, layout in layouts.values():
        if entry.layout is None:
            _to_values(entry, layout, optimizer)
        assert entry.reading is not None
        entry.reading.policy = policy
    renew_reducers(module)
    return_freed_memory()


@checked(ValueError, module=MODULE, optimizer=OPTIMIZER | NONE)
def densify(module: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Make every sparsely stored parameter of ``module`` dense again, in place.

    The inverse of :func:`sparsify`: pruned entries are zero in weights, gradients and optimizer
    state.

    Args:
        module: the model, or any part of it.
        optimizer: the optimizer that holds the parameters, if there is one.

    Raises:
        ValueError: for an argument of another type.
    """
    for entry in owned_parameters(module):
        if entry.layout is not None:
            _to_dense(entry, optimizer)
    for submodule in module.modules():
        if isinstance(submodule, SparseModule):
            make_dense(submodule)
    renew_reducers(module)


def layouts(module: nn.Module) -> dict[str, Layout]:
    """The layout of each sparsely stored parameter, by name as in ``named_parameters()``."""
    return {
        name: entry.layout
        for name, entry in sparse_parameters(module).items()
        if entry.layout is not None
    }


def sparse_parameters(module: nn.Module) -> dict[str, Owned]:
    """The sparsely stored parameters, by name as in ``named_parameters()``."""
    owned = owned_parameters(module)
    return {entry.names[0]: entry for entry in owned if entry.layout is not None}


def owners(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules that have each parameter as an attribute, and by which name.

    The parameters are named as in ``named_parameters()``.
    """
    return {entry.names[0]: entry.owners for entry in owned_parameters(module)}


def owned_parameters(module: nn.Module) -> list[Owned]:
    """Every parameter once, in module order."""
    owned: dict[int, Owned] = {}
    for prefix, submodule in module.named_modules():
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                entry = owned.setdefault(id(parameter), Owned(parameter, [], []))
                entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
                entry.owners.append((submodule, attribute))
    return list(owned.values())


def _checked_layout(name: str, entry: Owned, mask: Tensor, index_format: str | None) -> Layout:
    parameter, present = entry.parameter, entry.layout
    shape = parameter.shape if present is None else present.shape
    refuse_mask(name, mask)
    if mask.shape != shape:
        raise ValueError(
            f"The mask of '{name}' has shape {tuple(mask.shape)}, the parameter {tuple(shape)}."
        )
    if parameter.is_meta:
        raise ValueError(f"'{name}' is on the meta device: this process does not hold its values.")
    if not parameter.is_floating_point():
        raise ValueError(f"'{name}' is of {parameter.dtype}; only floating parameters are pruned.")
    layout = layout_of(mask.to(parameter.device), index_format)
    if present is not None and not present.same_entries(layout):
        raise ValueError(
            f"'{name}' is already stored sparse with another mask ({present.nnz} of "
            f"{shape.numel()} entries kept). Call densify(module) first."
        )
    return layout


def _to_values(entry: Owned, layout: Layout, optimizer: Optimizer | None) -> None:
    parameter, gradient = entry.parameter, entry.parameter.grad
    reading = Reading(parameter.dtype)
    master = master_dtype(parameter.dtype)
    kept = None if gradient is None else compress_gradient(gradient, layout).to(master)
    replace(parameter, layout.compress(parameter.detach()).to(master), kept)
    if optimizer is not None and parameter in optimizer.state:
        state = optimizer.state[parameter]
        state.update(compress_state(state, layout, master))
    for owner, attribute in entry.owners:
        make_sparse(owner, attribute, layout, reading)


def _to_dense(entry: Owned, optimizer: Optimizer | None) -> None:
    layout, reading = entry.layout, entry.reading
    assert layout is not None
    assert reading is not None
    parameter, gradient = entry.parameter, entry.parameter.grad
    dense = None if gradient is None else layout.densify(gradient.to(reading.dtype))
    replace(parameter, layout.densify(parameter.detach().to(reading.dtype)), dense)
    if optimizer is not None and parameter in optimizer.state:
        state = optimizer.state[parameter]
        state.update(expand_state(state, layout, reading.dtype))


def replace(parameter: nn.Parameter, values: Tensor, gradient: Tensor | None) -> None:
    """Give ``parameter`` new values of another shape, and the gradient that goes with them.

    ``set_`` and not ``.data =``: it also renews the node at which autograd accumulates the
    gradient, which hooks keep alive and which would go on expecting the former shape. ``.data =``
    does so where the dtype changes, which ``set_`` cannot.
    """
    parameter.grad = None
    if values.dtype != parameter.dtype:
        parameter.data = values
    with torch.no_grad():
        parameter.set_(values)  # type: ignore[call-overload]
    parameter.grad = gradient


def renew_reducers(module: nn.Module) -> None:
    """Let each ``DistributedDataParallel`` make its buckets anew, as it does when unpickled."""
    for submodule in module.modules():
        if isinstance(submodule, DistributedDataParallel):
            submodule.__setstate__(submodule.__getstate__())
