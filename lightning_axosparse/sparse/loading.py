"""Loading: weights from a file straight into sparse storage, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse.formats import layout_of
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.module import make_sparse
from lightning_axosparse.sparse.reading import Reading, master_dtype
from lightning_axosparse.sparse.swap import Owned, owned_parameters, renew_reducers, replace
from lightning_axosparse.sparse.weight import SparseWeight

Skipped = Callable[[str], bool]


def load_kept(
    module: nn.Module,
    state: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    masks: Mapping[str, Tensor],
    skip: Sequence[str] = (),
) -> list[str]:
    """Load a module's state, in place, and store the masked parameters sparse.

    Neither the masked parameters of ``state`` nor those of the module are ever dense all at once
    through this: each is read, reduced to its kept entries and let go. What of the module is on the
    meta device comes to be on CPU.

    Args:
        module: the model; a parameter that is stored sparse already takes over its mask here.
        state: name -> tensor, as in ``module.state_dict()``; best one that reads when asked.
        shapes: name -> the dense shape that it has in ``state``, for each name there.
        masks: parameter name -> bool tensor of its shape, True where an entry is kept.
        skip: patterns (as in :mod:`fnmatch`) of names to leave alone: a fresh head. They may be
            missing in ``state``, of another shape there, or unknown to the module.

    Returns:
        The masked names that are stored sparse now.

    Raises:
        ValueError: for names that are on one side alone, or a module on the meta device that
            ``state`` does not fill, and for masks and parameters of other shapes, before anything
            has changed.
    """

    def skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    owned = [entry for entry in owned_parameters(module) if not all(map(skipped, entry.names))]
    _refuse_names(module, owned, state, skipped)
    _refuse_masks(owned, masks)
    _refuse_shapes(owned, shapes)
    adopted = []
    rest = {name for name in state if not skipped(name)}
    for entry in owned:
        masked = next((name for name in entry.names if name in masks), None)
        if masked is None:
            _materialise(entry)
        else:
            stored = next(name for name in entry.names if name in state)
            _adopt(entry, state[stored], masks[masked])
            adopted.append(masked)
            rest.difference_update(entry.names)
    _materialise_buffers(module)
    module.load_state_dict({name: state[name] for name in state if name in rest}, strict=False)
    renew_reducers(module)
    return adopted


def _adopt(entry: Owned, tensor: Tensor, mask: Tensor) -> None:
    """Make ``entry`` the kept entries of ``tensor``."""
    parameter = entry.parameter
    layout = layout_of(mask.to(tensor.device))
    reading = entry.reading or Reading(parameter.dtype)
    values = _kept(tensor.detach(), layout).to(reading.dtype).to(master_dtype(reading.dtype))
    if parameter.is_meta:
        _take_the_place(entry, values)
    else:
        layout.move(parameter.device)
        replace(parameter, values.to(parameter.device), None)
    for owner, attribute in entry.owners:
        make_sparse(owner, attribute, layout, reading)


def _kept(tensor: Tensor, layout: Layout) -> Tensor:
    """The entries of ``tensor`` that ``layout`` keeps, not by way of a dense one if it has them."""
    if isinstance(tensor, SparseWeight) and tensor.entries.same_entries(layout):
        return tensor.unchanged().clone()
    return layout.compress(tensor)


def _materialise(entry: Owned) -> None:
    """Give a dense parameter that is on the meta device memory on CPU."""
    if entry.parameter.is_meta:
        _take_the_place(entry, torch.empty_like(entry.parameter, device="cpu"))


def _take_the_place(entry: Owned, values: Tensor) -> None:
    parameter = nn.Parameter(values, requires_grad=entry.parameter.requires_grad)
    for owner, attribute in entry.owners:
        owner._parameters[attribute] = parameter


def _materialise_buffers(module: nn.Module) -> None:
    for submodule in module.modules():
        for attribute, buffer in submodule._buffers.items():
            if buffer is not None and buffer.is_meta:
                submodule._buffers[attribute] = torch.empty_like(buffer, device="cpu")


def _refuse_names(
    module: nn.Module, owned: Sequence[Owned], state: Mapping[str, Tensor], skipped: Skipped
) -> None:
    """Refuse names that are on one side alone, and what would stay on the meta device."""
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
        ],
    }
    told = [f"{what} {_few(names)}." for what, names in problems.items() if names]
    if told:
        raise ValueError(
            " ".join(told)
            + " Skip what is not to be loaded (`skip=`, such as ['head.*']); build what is "
            "computed or fresh outside of `torch.device('meta')`."
        )


def _refuse_shapes(owned: Sequence[Owned], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights of other shapes than the parameters have."""
    for entry in owned:
        for name in entry.names:
            if name in shapes and shapes[name] != _shape(entry):
                raise ValueError(
                    f"'{name}' has shape {tuple(shapes[name])} in the file, "
                    f"{tuple(_shape(entry))} in the module. Skip it (`skip=['{name}']`), or load "
                    "into the model that it was saved from."
                )


def _shape(entry: Owned) -> torch.Size:
    return entry.parameter.shape if entry.layout is None else entry.layout.shape


def _refuse_masks(owned: Sequence[Owned], masks: Mapping[str, Tensor]) -> None:
    """Refuse masks of other shapes than the parameters have."""
    for entry in owned:
        shape = _shape(entry)
        for name in entry.names:
            if name in masks and masks[name].shape != shape:
                raise ValueError(
                    f"'{name}' has shape {tuple(shape)} in the module, "
                    f"{tuple(masks[name].shape)} in the ticket. Skip it (`skip=['{name}']`), or "
                    "load into the model that the ticket was drawn from."
                )


def _few(names: Sequence[str]) -> str:
    """Some of ``names``, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(f"'{name}'" for name in names[:5]) + more
