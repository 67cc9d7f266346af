"""Chooses the parameters of a model that are pruned; all others stay dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_axosparse.sparse.module.parameters import Owner, owned_parameters
from lightning_axosparse.support.troubleshooting import see

ParameterKind = Literal["weight", "embedding", "head", "norm", "bias", "other"]
"""What a parameter is to its layer."""

PRUNED_BY_DEFAULT: Mapping[str, bool] = {
    "weight": True,
    "embedding": True,
    "head": True,
    "norm": False,
    "bias": False,
    "other": False,
}
"""Whether each kind is pruned."""

Prune = Mapping[str, bool] | Callable[[str, nn.Parameter], bool]
"""A table by kinds and patterns of names, or a function of a parameter's name and the parameter."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, _NormBase)


def prunable(module: nn.Module, prune: Prune | None = None) -> dict[str, torch.Size]:
    """Return the parameters that are pruned, with their dense shapes, in module order.

    Tied parameters appear once; parameters on the meta device are included.

    Args:
        module: the whole model.
        prune: a table, whose keys are kinds or patterns (as in :mod:`fnmatch`) of parameter names,
            and whose values say whether they are pruned: the last entry that fits a parameter
            counts, and :data:`PRUNED_BY_DEFAULT` where none fits. Or a function that decides for
            each floating-point parameter. The kinds are "embedding" (also of a tied head), "head"
            (the weight of the last linear layer), "norm" (both parameters of a normalization),
            "bias", "weight" (all others with two or more dimensions) and "other".

    Raises:
        ValueError: if a key of the table is no kind and matches no parameter.
    """
    kinds = parameter_kinds(module)
    owned = {entry.names[0]: entry for entry in owned_parameters(module)}
    if prune is None or isinstance(prune, Mapping):
        _validate(prune or {}, list(kinds))
        table = [*PRUNED_BY_DEFAULT.items(), *(prune or {}).items()]
        wanted = {name: _decide(table, name, kind) for name, kind in kinds.items()}
    else:
        # A weight that is stored sparse is shown in its dense shape.
        wanted = {name: bool(prune(name, getattr(*owned[name].owners[0]))) for name in kinds}
    return {name: owned[name].shape for name, chosen in wanted.items() if chosen}


def parameter_kinds(module: nn.Module) -> dict[str, ParameterKind]:
    """Return the kind of each floating-point parameter, in module order."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    head = linear[-1] if linear else None
    return {
        entry.names[0]: _kind(entry.owners, entry.shape, head)
        for entry in owned_parameters(module)
        if entry.parameter.is_floating_point()
    }


def _kind(owners: list[Owner], shape: torch.Size, head: nn.Linear | None) -> ParameterKind:
    layers = [layer for layer, _ in owners]
    if any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in layers):
        return "embedding"
    if any(isinstance(layer, _NORMS) or type(layer).__name__.endswith("Norm") for layer in layers):
        return "norm"
    if "bias" in owners[0][1]:
        return "bias"
    if len(shape) < 2:
        return "other"
    return "head" if any(layer is head for layer in layers) else "weight"


def _decide(table: list[tuple[str, bool]], name: str, kind: ParameterKind) -> bool:
    return [chosen for key, chosen in table if key == kind or fnmatchcase(name, key)][-1]


def _validate(table: Mapping[str, bool], names: list[str]) -> None:
    for key in table:
        if key not in PRUNED_BY_DEFAULT and not any(fnmatchcase(name, key) for name in names):
            raise ValueError(
                f"prune={{'{key}': ...}}: '{key}' matches no parameter and is none of the kinds "
                f"{', '.join(PRUNED_BY_DEFAULT)}. There are: {few(names)}." + see("pruning")
            )


def few(names: list[str]) -> str:
    """The first names, and how many there are more, for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
