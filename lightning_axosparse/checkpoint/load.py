"""Loads a model's weights from a file straight into sparse storage, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import Metric

from lightning_axosparse.checkpoint.safetensors import SafetensorsState, is_safetensors
from lightning_axosparse.pruning.masks import MaskBits
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse.module.convert import load_loops_of, renew_reducers
from lightning_axosparse.sparse.module.parameters import (
    OwnedParameter,
    owned_parameters,
    set_values,
    validate_not_deferred,
)
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm, master_dtype
from lightning_axosparse.sparse.store.weight import SparseWeight
from lightning_axosparse.support import archive
from lightning_axosparse.support.arguments import (
    MODULE,
    NONE,
    PATH,
    TEXT,
    Kind,
    checked,
    instance_of,
    list_of,
)
from lightning_axosparse.support.files import reading, require_file
from lightning_axosparse.support.troubleshooting import first_few, see

Skipped = Callable[[str], bool]
"""Whether a name matches one of the patterns of names to skip."""


@checked(
    ValueError,
    module=MODULE,
    source=PATH | instance_of("a mapping of names to tensors", Mapping),
    ticket=instance_of("a Ticket", Ticket) | PATH | NONE,
    skip=list_of("a list of patterns, such as ['head.*']", TEXT),
    dtype=Kind("torch.int8 or None", lambda value: value in (torch.int8, None)),
)
def load_sparse(
    module: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Any],
    ticket: Ticket | str | os.PathLike[str] | None = None,
    skip: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> Ticket:
    """Load a model and store its pruned weights sparse, in place, without their dense forms.

    The file is mapped into memory and read one tensor at a time, so the dense weights need not fit
    into memory; in that case build the module under ``torch.device("meta")``. The loaded module
    predicts and trains with any Trainer or none, and only unpruned entries change. A pruned
    parameter is a vector: where ``configure_optimizers`` tells matrices by their number of
    dimensions, use ``AxoSparseStrategy``, which shows it the dense shapes. For a pipeline pass the
    returned ticket to ``GradualPruning(ticket=...)``, which saves it in checkpoints.

    Args:
        module: the model; with ``skip`` it may have parameters that are not in ``source``.
        source: a Lightning checkpoint, a file of a state dict, a ``.safetensors`` file (of
            :func:`save_safetensors` or dense), or the result of ``torch.load`` for such a file:
            call that with ``weights_only=False`` if a checkpoint that you trust holds other
            objects.
        ticket: the ticket, or its file; None takes the ticket in ``source``.
        skip: patterns (as in :mod:`fnmatch`) of names to leave as they are in ``module``, such as
            ``["head.*"]`` for a new head. They may be missing in ``source``, have another shape
            there, or be unknown to ``module``.
        dtype: ``torch.int8`` rounds the unpruned values of linear layers to eight bits, with one
            scale for each output, to predict on a CPU: a model then decodes faster and takes less
            memory. Where the processor has AVX-512 with VBMI and VNNI, products of up to 16 tokens
            round their inputs to eight bits, too, as dynamic quantization does. The module no
            longer trains, but for what ``skip`` left out, and can't be saved. None: the module's
            own.

    Returns:
        The ticket, restricted to the parameters that are stored sparse now.

    Raises:
        FileNotFoundError: if there is no such file.
        CorruptFileError: if the file is not as it was written, or has other objects too; nothing
            has changed then.
        ValueError: for an argument of another type, if the file holds no weights, there is no
            ticket, or for names or shapes that do not fit.
    """
    state, saved = _state_in(source)
    if isinstance(ticket, str | os.PathLike):
        ticket = Ticket.load(ticket)

    def skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    owned = [entry for entry in owned_parameters(module) if not all(map(skipped, entry.names))]
    _validate_names(module, owned, state, skipped)
    _validate_shapes(module, state, skipped)
    ticket = ticket or saved
    if ticket is None and isinstance(state, SafetensorsState):
        ticket = _ticket_of(state, skipped)
    if ticket is None:
        raise ValueError(
            "There is no ticket in the file, so nothing tells which weights to keep; a checkpoint "
            "from before the draw has none yet. Pass `ticket=`: the callback that pruned has it as "
            "its `ticket`." + see("checkpoints")
        )
    ticket.validate_shapes(owned)
    stored = _load_sparse_state(module, owned, state, ticket.masks, skipped)
    if dtype is not None:
        _round(module, owned)
    return replace(ticket, masks=ticket.part(stored))


def _load_sparse_state(
    module: nn.Module,
    owned: Sequence[OwnedParameter],
    state: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    skipped: Skipped,
) -> list[str]:
    """Load a module's state, in place, store the masked parameters sparse, and return their names.

    At most one masked parameter is dense at a time. Those on the meta device are moved to CPU.
    """
    sparse_names = []
    rest = {name for name in state if not skipped(name)}
    for entry in owned:
        masked = next((name for name in entry.names if name in masks), None)
        validate_not_deferred(entry.names[0], entry.parameter)
        if masked is None:
            if entry.parameter.is_meta:
                _replace_parameter(entry, torch.empty_like(entry.parameter, device="cpu"))
        else:
            in_file = next(name for name in entry.names if name in state)
            _store_sparse(entry, state[in_file], masks[masked])
            sparse_names.append(masked)
            rest.difference_update(entry.names)
    _allocate_buffers(module)
    module.load_state_dict({name: state[name] for name in state if name in rest}, strict=False)
    renew_reducers(module)
    load_loops_of(module)
    return sparse_names


def _round(module: nn.Module, owned: Sequence[OwnedParameter]) -> None:
    """Round the linear layers of a module; their parameters, and the others, stay as they are."""
    from lightning_axosparse.sparse.module.int8_linear import round_layers

    for entry in owned:
        for owner, attribute in entry.owners:
            getattr(owner, attribute).requires_grad_(False)
    round_layers(module)


def _store_sparse(entry: OwnedParameter, tensor: Tensor, mask: Tensor) -> None:
    """Store a parameter sparse, with the unpruned entries of ``tensor``."""
    parameter = entry.parameter
    layout = layout_of(mask.to(tensor.device))
    form = entry.form or DenseForm(parameter.dtype)
    values = _unpruned_values(tensor.detach(), layout).to(form.dtype).to(master_dtype(form.dtype))
    if parameter.is_meta:
        _replace_parameter(entry, values)
    else:
        layout.move(parameter.device)
        set_values(parameter, values.to(parameter.device), None)
    entry.read_as(layout, form)


def _unpruned_values(tensor: Tensor, layout: Layout) -> Tensor:
    """Return the unpruned entries of ``tensor``, which stays sparse if its layout is the same."""
    if isinstance(tensor, SparseWeight) and tensor.sparse_layout.same_entries(layout):
        return tensor.unpruned_values().clone()
    return layout.compress(tensor)


def _replace_parameter(entry: OwnedParameter, values: Tensor) -> None:
    parameter = nn.Parameter(values, requires_grad=entry.parameter.requires_grad)
    for owner, attribute in entry.owners:
        owner._parameters[attribute] = parameter


def _allocate_buffers(module: nn.Module) -> None:
    """Allocate buffers that are on the meta device on CPU."""
    for submodule in module.modules():
        for attribute, buffer in submodule._buffers.items():
            if buffer is not None and buffer.is_meta:
                submodule._buffers[attribute] = torch.empty_like(buffer, device="cpu")


def _validate_names(
    module: nn.Module,
    owned: Sequence[OwnedParameter],
    state: Mapping[str, Tensor],
    skipped: Skipped,
) -> None:
    """Check that module and file have the same names and nothing stays on the meta device."""
    expected = module.state_dict(keep_vars=True)
    filled = {name for entry in owned for name in entry.names if state.keys() & entry.names}
    problems = {
        "The file lacks": [
            name for name in expected if not (name in state or name in filled or skipped(name))
        ],
        "The module has no": [name for name in state if not (name in expected or skipped(name))],
        "On the meta device, and not to be filled from the file:": [
            name
            for name, tensor in chain(module.named_parameters(), module.named_buffers())
            if tensor.is_meta and (name not in expected or skipped(name))
        ]
        + [
            name
            for name, part in module.named_modules()
            if isinstance(part, Metric)
            and any(isinstance(v, Tensor) and v.is_meta for v in part._defaults.values())
        ],
    }
    messages = [
        f"{problem} {first_few(list(map(repr, names)))}."
        for problem, names in problems.items()
        if names
    ]
    if messages:
        raise ValueError(
            " ".join(messages)
            + " Skip what is not to be loaded (`skip=`, such as ['head.*']); build what is "
            "computed or initialized anew outside of `torch.device('meta')`." + see("checkpoints")
        )


def _validate_shapes(module: nn.Module, state: Mapping[str, Tensor], skipped: Skipped) -> None:
    """Check that the tensors in the file have the shapes of those in the module.

    It runs before any is read, as the shapes in a file may be larger than the memory.
    """
    shapes = (
        state.shapes
        if isinstance(state, SafetensorsState)
        else {name: value.shape for name, value in state.items() if isinstance(value, Tensor)}
    )
    expected = {
        name: tensor.shape
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor) and not is_lazy(tensor)
    }
    for name in state:
        shape = shapes.get(name)
        if name in expected and expected[name] != shape and not skipped(name):
            actual = "no tensor" if shape is None else f"shape {tuple(shape)}"
            raise ValueError(
                f"'{name}' has {actual} in the file, {tuple(expected[name])} in the module. Skip "
                f"it (`skip=['{name}']`), or load into the model that it was saved from."
                + see("checkpoints")
            )


def _state_in(
    source: str | os.PathLike[str] | Mapping[str, Any],
) -> tuple[Mapping[str, Tensor], Ticket | None]:
    """Return the weights in ``source``, which has not changed, and a callback's ticket in it."""
    if isinstance(source, Mapping):
        return source.get("state_dict", source), Ticket.in_checkpoint(source)
    path = Path(source)
    require_file(path)
    if is_safetensors(path):
        return SafetensorsState(path), None
    archive.verify(path)
    with reading(path):
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"'{path}' holds a {type(content).__name__}, not weights by their names."
            + see("checkpoints")
        )
    with reading(path):
        return _state_in(content)


def _ticket_of(state: SafetensorsState, skipped: Skipped) -> Ticket | None:
    """Return the ticket of the masks of a sparse safetensors file."""
    names = (name for name in state.sparse if not skipped(name))
    masks = MaskBits.merged(MaskBits({name: state.mask(name)}) for name in names)
    ticket = Ticket(masks, pruning_ratio=0.0)
    return replace(ticket, pruning_ratio=ticket.sparsity) if masks else None
