"""Finds out which tensors a forward hook keeps, or keeps results of.

A hook may keep a tensor, or a container of it, in a list somewhere; or it may keep what it has
computed from it. A hook that only reads, or only changes what the module returns, keeps nothing.
Numbers (``item()``) are no tensors and do not count.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

PLAIN = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


def call_hook(
    hook: Callable[..., Any], module: nn.Module, given: tuple[Any, ...]
) -> tuple[Any, set[int]]:
    """Call a hook.

    Args:
        hook: a forward hook, or a forward pre-hook.
        module: whose hook it is.
        given: its arguments besides the module.

    Returns:
        What the hook returned, and the tensors, by ``id``, that it keeps or keeps results of.
    """
    # Both counts are taken in this function, so that they see the same references.
    known = list(nodes(given))
    before = [sys.getrefcount(node) for node in known]
    with _Operators(known) as operators:
        result = hook(module, *given)
    after = [sys.getrefcount(node) for node in known]
    passed_on = Counter(id(node) for node in nodes(result, {id(node) for node in known}))
    kept = [
        node
        for node, old, new in zip(known, before, after, strict=True)
        if new - passed_on[id(node)] > old
    ]
    read = {id(leaf) for node in kept for leaf in nodes(node) if isinstance(leaf, Tensor)}
    return result, read | operators.read(result)


def nodes(tree: Any, known: Collection[int] = ()) -> Iterator[Any]:
    """The tensors in nested containers and objects, and these containers and objects.

    Args:
        tree: the outermost.
        known: by ``id``, what is not searched.
    """
    pending, seen = [tree], set(known)
    while pending:
        node = pending.pop()
        if isinstance(node, (*PLAIN, nn.Module, type)):
            continue
        yield node
        if isinstance(node, (Tensor, np.ndarray)) or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, (list, tuple)):
            pending += node
        else:
            pending += getattr(node, "__dict__", {}).values()


class _Operators(TorchFunctionMode):
    """Records which of some tensors a hook computes with, and whether it keeps results.

    Args:
        given: the tensors and their containers.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        super().__init__()
        self._given = {id(node) for node in given if isinstance(node, Tensor)}
        self._used: set[int] = set()
        self._made: list[weakref.ref[Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._used |= {id(node) for node in nodes((args, kwargs))} & self._given
        self._made += [
            weakref.ref(node)
            for node in nodes(result)
            if isinstance(node, (Tensor, np.ndarray)) and id(node) not in self._given
        ]
        return result

    def read(self, returned: Any) -> set[int]:
        """The tensors, by ``id``, of which results exist besides what the hook has returned."""
        passed_on = {id(node) for node in nodes(returned)}
        left = any(made() is not None and id(made()) not in passed_on for made in self._made)
        return self._used if left else set()
