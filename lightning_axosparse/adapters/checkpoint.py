"""Checkpoints of a pipeline in the exact form that one process writes, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_axosparse.pipeline.split import Split
from lightning_axosparse.sparse.masters import state_with_master
from lightning_axosparse.sparse.optimizer import compress_state
from lightning_axosparse.sparse.swap import Owned, owned_parameters

Gather = Callable[[Any], "list[Any]"]
"""Hands every stage's object to the first stage; an empty list elsewhere."""

GroupNames = list[list[str]]
"""Parameter names of each param group, in the order of ``configure_optimizers``."""


def gather_model_state(split: Split, stages: range, gather: Gather) -> dict[str, Any]:
    """Collect the module's state on the first stage, in the key order of the whole module.

    Returns:
        The state, its tensors on CPU, tied ones the same under all their names, so that files hold
        them once; an empty dict on other stages.
    """
    state = split.module.state_dict()
    tied = [entry.names for entry in owned_parameters(split.module) if entry.names[0] in state]
    first = {name: names[0] for names in tied for name in names}
    mine = {
        key: value.cpu() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if first.get(key, key) == key and split.source_of(key) in stages
    }
    whole: dict[str, Any] = {}
    for part in gather(mine):
        whole.update(part)
    return {key: whole[first.get(key, key)] for key in state} if whole else {}


def local_model_state(state: Mapping[str, Any], split: Split, stages: range) -> dict[str, Any]:
    """Choose what lives on these stages from the state of a whole module."""
    return {key: value for key, value in state.items() if split.stage_of(key) in (None, *stages)}


def gather_optimizer_state(
    optimizer: Optimizer,
    groups: GroupNames,
    names: Mapping[Any, str],
    sparse: Mapping[str, Owned],
    gather: Gather,
) -> dict[str, Any]:
    """Collect an optimizer's state on the first stage, dense, as ``Optimizer.state_dict`` has it.

    Master values of sparse weights that read in fewer bits are in it, too.

    Returns:
        The state dict; an empty dict on other stages.
    """
    mine = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name, state = names[parameter], optimizer.state.get(parameter, {})
        dense = state_with_master(sparse[name], state) if name in sparse else state
        if dense:
            mine[name] = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in dense.items()}
    parts = gather(mine)
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
    sparse: Mapping[str, Owned],
) -> dict[str, Any]:
    """Choose this rank's part of a whole optimizer's state dict, compact where weights are sparse.

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
                entry = by_name[name]
                layout = sparse[name].layout if name in sparse else None
                local["state"][index] = compress_state(entry, layout) if layout else entry
    return local
