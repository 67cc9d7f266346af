"""Walks through nested containers and objects, of which a pytree may know nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}

_NOT_SEARCHED = (
    *PLAIN,
    *(
        nn.Module,
        type,
        Optimizer,
        DataLoader,
        Dataset,
        torch.Generator,
        torch_module.RemovableHandle,
    ),
)
_PACKAGES_NOT_SEARCHED = ("lightning", "pytorch_lightning", "lightning_fabric")
_MOST_NODES = 100_000
"""A data set that a module holds as a list is no place for what a step computes."""


def nodes(tree: Any) -> Iterator[Any]:
    """The tensors in nested containers and objects, and these containers and objects."""
    pending, seen = [tree], set()
    while pending:
        node = pending.pop()
        if isinstance(node, _NOT_SEARCHED):
            continue
        yield node
        if isinstance(node, (Tensor, np.ndarray)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple, set, frozenset, deque)):
            pending += node
        elif type(node).__module__.partition(".")[0] not in _PACKAGES_NOT_SEARCHED:
            pending += getattr(node, "__dict__", {}).values()


def attribute_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that can be reached from attributes of a module and of its submodules."""
    values = [
        value
        for each in module.modules()
        for name, value in (*vars(each).items(), *each._buffers.items())
        if name not in OF_EVERY_MODULE
    ]
    found = islice(nodes(values), _MOST_NODES)
    return (node for node in found if isinstance(node, Tensor))
