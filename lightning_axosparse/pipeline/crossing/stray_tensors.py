"""Notices tensors that a layer stores where no other stage sees them, such as in a global list.

Code behind the layers, which runs on one rank, would read what the layers of this rank alone have
stored there. That cannot be followed, so a message names the layer, after the first micro-batch. No
result depends on what is noticed.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Sequence
from itertools import chain
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lightning_axosparse.pipeline.crossing.placeholder import reachable_objects

_LEVELS = 6
"""How far from a tensor its owner may be: a dict in a list of an object is at the third level."""

_PASSING = (
    Tensor,
    FunctionCtx,
    CellType,
    FrameType,
    FunctionType,
    BuiltinFunctionType,
    GeneratorType,
)
"""What holds tensors only as long as the graph or a function needs them."""


class StraySearch:
    """Searches one layer of each class: it takes 0.1 seconds, and those of a class do the same."""

    def __init__(self) -> None:
        self._searched: set[type] = set()
        self._given: Sequence[Any] = ()
        self._before: Sequence[Tensor] | None = None

    def begin(self, layer: nn.Module, arguments: Sequence[Any]) -> None:
        """Note the tensors that are there before a layer, if it is to be searched."""
        if type(layer) not in self._searched:
            self._searched.add(type(layer))
            self._given, self._before = arguments, young_tensors()

    def finds_one(self, layer: nn.Module, output: Any, stored: Collection[int]) -> bool:
        """Return whether the layer has stored a tensor elsewhere.

        Args:
            layer: the layer.
            output: its output.
            stored: ids of the tensors in its side outputs.
        """
        if self._before is None:
            return False
        known = {id(each) for each in (*self._before, *reachable_objects((output, self._given)))}
        self._given, self._before = (), None
        return has_stray_tensor(known.union(stored), [*layer.modules()])


def young_tensors() -> list[Tensor]:
    """Return the tensors with a graph among the objects that Python has made lately."""
    objects = chain(gc.get_objects(generation=0), gc.get_objects(generation=1))
    # Not isinstance, which asks proxies for their class.
    tensors = (each for each in objects if issubclass(type(each), Tensor))
    # Reading `grad_fn` raises an error of some views whose base has changed.
    return [each for each in tensors if each.requires_grad and not each.is_leaf]


def has_stray_tensor(known: Collection[int], own: Collection[nn.Module]) -> bool:
    """Whether a young tensor is stored in another module, a class or a global variable.

    Args:
        known: ids of the tensors that were there before the layer, and of those in its arguments,
            output and side outputs.
        own: the modules of the layer.
    """
    held: list[Any] = [each for each in young_tensors() if id(each) not in known]
    seen = {id(held), *map(id, own)}
    for _ in range(_LEVELS if held else 0):
        holders = [each for each in gc.get_referrers(*held) if id(each) not in seen]
        if any(_lasts(each, held) for each in holders):
            return True
        held = [each for each in holders if not issubclass(type(each), _PASSING)]
        seen |= {*map(id, held), id(held), id(holders)}
    return False


def _lasts(holder: Any, held: Sequence[Any]) -> bool:
    """Whether what is held is an attribute of a module or class, or a global variable."""
    if isinstance(holder, FunctionType):
        return any(holder.__globals__ is each for each in held)
    return issubclass(type(holder), (nn.Module, ModuleType, type))
