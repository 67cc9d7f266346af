"""Finds the loops of a Trainer and their progress, which are private attributes of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress


def loops_of(trainer: Trainer) -> dict[str, Any]:
    """The loops of a Trainer and the loops inside them, by their attribute paths."""
    return _loops_in(vars(trainer), "trainer")


def _loops_in(attributes: Mapping[str, Any], path: str) -> dict[str, Any]:
    loops = {}
    for name, value in attributes.items():
        if isinstance(value, _Loop):
            loops[f"{path}.{name}"] = value
            loops |= _loops_in(vars(value), f"{path}.{name}")
    return loops


def progress_of(owner: Any) -> dict[str, Any]:
    """The attributes of a loop that say how far it is; none for any other object."""
    if not isinstance(owner, _Loop):
        return {}
    kinds = bool | int | float | str | Enum | _BaseProgress
    return {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}
