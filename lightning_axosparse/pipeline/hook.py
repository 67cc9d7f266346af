"""Hook: which of the tensors that a forward hook is given it leaves something behind of.

A hook may keep a tensor, or what it is in, in a list somewhere; or it may keep what it has computed
from it. A hook that only looks, or only changes what the module returns, leaves nothing. Numbers
that it reads off (``item()``) are no tensors and do not count.
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
        given: what it is given besides the module.

    Returns:
        What the hook returned, and the tensors, by ``id``, of which something is left behind.
    """
    # Counts and what is counted stand here, so that both counts see the same references.
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
    """The tensors in any nesting of containers and objects, and whatever they are in.

    Args:
        tree: the nesting.
        known: by ``id``, what is not looked into.
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
    """Sees which of some tensors a hook computes with, and whether anything is left of it.

    Args:
        given: the tensors, and what they are in.
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
        """The tensors, by ``id``, of which more is left than what the hook has returned."""
        passed_on = {id(node) for node in nodes(returned)}
        left = any(made() is not None and id(made()) not in passed_on for made in self._made)
        return self._used if left else set()
