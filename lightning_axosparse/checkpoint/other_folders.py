"""Puts what other strategies have written to a folder in the form of one process's checkpoint.

Lightning's ``ModelParallelStrategy`` and ``FSDPStrategy`` leave weights and optimizers out of their
table. They name the parameters of optimizers, which one process counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

Keys = tuple[str | int, ...]


def checkpoint_of(entries: Mapping[Keys, Any]) -> dict[str, Any]:
    """Return the entries of a Lightning checkpoint.

    Args:
        entries: by the keys that lead to it, each tensor or value in the folder.
    """
    tree = _nested(entries)
    if "model" in tree:  # as FSDPStrategy calls it
        tree.setdefault("state_dict", tree.pop("model"))
    optimizers = []
    for number in count():
        if f"optimizer_{number}" not in tree:
            break
        optimizers.append(_counted(tree.pop(f"optimizer_{number}")))
    return tree | ({"optimizer_states": optimizers} if optimizers else {})


def _nested(entries: Mapping[Keys, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for keys, value in entries.items():
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = value
    return tree


def _counted(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with the numbers of parameters in the place of their names."""
    groups = optimizer["param_groups"]
    groups = [groups[number] for number in sorted(groups)] if isinstance(groups, dict) else groups
    order = [name for group in groups for name in group["params"]]
    number_of = {name: number for number, name in enumerate(order)}
    return {
        "state": {number_of[name]: state for name, state in optimizer.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [number_of[name] for name in group["params"]]} for group in groups
        ],
    }
