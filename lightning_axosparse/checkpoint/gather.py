"""Gathers the state of a pipeline in the form that one process saves, and selects a rank's part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.checkpoint.stage_tensors import StageTensors
from lightning_axosparse.pipeline.sharding import Sharding
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.optimizer_state import compress_state, with_master
from lightning_axosparse.sparse.parameters import OwnedParameter, owned_parameters
from lightning_axosparse.sparse.weight import SparseWeight
from lightning_axosparse.support.deferred_tensor import DeferredTensor, all_made
from lightning_axosparse.support.torch_internals import tree_map_only

GroupNames = list[list[str]]
"""Parameter names of each param group, in the order of ``configure_optimizers``."""


def gather_model_state(split: Sharding, stages: range, tensors: StageTensors) -> dict[str, Any]:
    """Gather the module's state on the first stage, in the key order of the whole module.

    Args:
        split: which tensors each stage keeps.
        stages: those of this rank.
        tensors: gathers what the stages have.

    Returns:
        The state, with the same tensor object under all names of a tied parameter, so that files
        hold it once; an empty dict on other stages. Larger tensors are deferred.
    """
    state = split.module.state_dict(keep_vars=True)
    tied = [entry.names for entry in owned_parameters(split.module) if entry.names[0] in state]
    first = {name: names[0] for names in tied for name in names}
    mine = {
        key: _deferred(f"state_dict.{key}", value)
        for key, value in state.items()
        if first.get(key, key) == key and split.source_of(key) in stages
    }
    whole: dict[str, Any] = {}
    for part in tensors.gather(mine):
        whole.update(part)
    return {key: whole[first.get(key, key)] for key in state} if whole else {}


def local_model_state(state: Mapping[str, Any], split: Sharding, stages: range) -> dict[str, Any]:
    """Return the part of a whole module's state that these stages hold."""
    return {
        key: all_made(value)
        for key, value in state.items()
        if split.stage_of(key) in (None, *stages)
    }


def gather_optimizer_state(
    optimizer: Optimizer,
    groups: GroupNames,
    names: Mapping[Any, str],
    sparse: Mapping[str, OwnedParameter],
    tensors: StageTensors,
) -> dict[str, Any]:
    """Gather an optimizer's state on the first stage, dense, in the form of its ``state_dict``.

    It includes the master weights of sparse weights whose dtype has fewer bits.

    Returns:
        The state dict; an empty dict on other stages. Larger tensors are deferred.
    """
    mine = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name, state = names[parameter], optimizer.state.get(parameter, {})
        layout = None
        if name in sparse:
            layout, state = sparse[name].layout, with_master(sparse[name], state)
        if state:
            mine[name] = {
                key: _deferred(f"optimizer_states.{key}.{name}", value, layout)
                for key, value in state.items()
            }
    parts = tensors.gather(mine)
    if not parts:
        return {}
    by_name = {name: state for part in parts for name, state in part.items()}
    order = [name for group in groups for name in group]
    index = {name: position for position, name in enumerate(order)}
    return {
        "state": {index[name]: by_name[name] for name in order if name in by_name},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [index[name] for name in members],
            }
            for group, members in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def local_optimizer_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    groups: GroupNames,
    names: Mapping[Any, str],
    sparse: Mapping[str, OwnedParameter],
) -> dict[str, Any]:
    """Return this rank's part of an optimizer's whole state dict, compressed for sparse weights.

    Returns:
        A state dict for ``optimizer.load_state_dict``.
    """
    order = [name for group in groups for name in group]
    by_name = {order[index]: entry for index, entry in state["state"].items()}
    local: dict[str, Any] = {"state": {}, "param_groups": []}
    position = 0
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        indices = list(range(position, position + len(group["params"])))
        position += len(indices)
        local["param_groups"].append({**saved, "params": indices})
        for index, parameter in zip(indices, group["params"], strict=True):
            name = names[parameter]
            if name in by_name:
                layout = sparse[name].layout if name in sparse else None
                local["state"][index] = {
                    key: _own(value, layout) for key, value in by_name[name].items()
                }
    return local


def _own(value: Any, layout: Layout | None) -> Any:
    """A value of optimizer state with memory of its own, not that of a mapped file."""
    made = all_made(value)
    if layout is None:
        return tree_map_only(Tensor, Tensor.clone, made)
    return compress_state({"": made}, layout)[""]


def _deferred(name: str, value: Any, layout: Layout | None = None) -> Any:
    """A tensor of this stage as checkpoints hold it: dense and on CPU once it is made.

    Args:
        name: of the tensor in the checkpoint.
        value: of the state; what is no tensor stays as it is.
        layout: of the kept entries that ``value`` may consist of.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, SparseWeight):
        return DeferredTensor(name, value.shape, value.dtype, partial(_dense, value))
    value = value.detach()
    if layout is not None and value.shape == (layout.nnz,):
        make = partial(layout.to(value.device).densify, value)
        return DeferredTensor(name, layout.shape, value.dtype, make)
    return DeferredTensor(name, value.shape, value.dtype, lambda: value)


@torch.no_grad()
def _dense(weight: SparseWeight) -> Tensor:
    return weight.dense()
