"""Follows the values that code before the first layer computes, such as residuals and conditions.

The code before the layers runs once on the whole batch, but each stage also runs it on every
micro-batch, to reach its layers. Both runs number the results of torch functions; if they call the
same functions, they give the same numbers. So what a micro-batch has computed can be compared with
its rows of what the batch has, and be replaced by them where later code reads it.

If Python reads a number from a tensor (``if mask.all()``, ``x.max().item()``), a micro-batch may
read another one than the batch. Then it gets that of the batch, so that it takes the same branch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import Place
from lightning_axosparse.support.object_trees import object_map
from lightning_axosparse.support.torch_internals import (
    PausableMode,
    never_compiled,
    plain_torch_functions,
    tensors_in,
    tree_map_only,
)

READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "equal")
) | {torch.equal, torch.allclose, torch.Tensor.allclose, torch.is_nonzero}
"""The functions with which Python reads a number from tensors."""

Number = tuple[Callable[..., Any], Any]
"""A function that has read a number, and the number."""

Rows = Callable[[Place, Tensor], Tensor]
"""Returns what replaces a result of a micro-batch: its rows of that of the batch."""


class FrontValues(PausableMode):
    """The results of torch functions before the first layer, in one run of the step.

    Args:
        replaces: whether they are replaced where later code reads them; else the mode is left
            at the first layer.
        batch: the numbers that the run on the batch has read, which this one gets; None to read
            its own.

    Attributes:
        functions: the functions that have returned new results, in order.
        numbers: the run's own numbers that Python has read.
    """

    def __init__(self, replaces: bool = False, batch: Sequence[Number] | None = None) -> None:
        super().__init__()
        self.replaces = replaces
        self.numbers: list[Number] = []
        self._of_batch: Sequence[Number] = batch or ()
        self.functions: list[Callable[..., Any]] = []
        self._results, self._changed, self._is_front = 0, 0, True
        self._places: dict[int, tuple[weakref.ref[Tensor], Place]] = {}
        self._rows: Rows | None = None
        self._replaced: dict[int, tuple[Tensor, Tensor]] = {}
        """The replacement of each result that was read, with the result, by its ``id``."""

    def alive(self) -> dict[Place, Tensor]:
        """Return the results that later code may still read, by their places."""
        results = ((place, reference()) for reference, place in self._places.values())
        return {place: result for place, result in results if result is not None}

    def end_front(self, rows: Rows) -> None:
        """End the code before the first layer.

        Args:
            rows: returns the replacements of results.
        """
        self._is_front, self._rows = False, rows
        if not self.replaces:
            self.leave()

    @never_compiled
    def replace(self, tree: Any) -> Any:
        """Replace the results in any object, such as the arguments of a layer."""
        return object_map(Tensor, self._replacement, tree)

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function; number its results, or replace results among its arguments."""
        if self._is_front:
            result = func(*args, **kwargs)
            if func in READS:
                return self._read(func, result)
            if func is Tensor.__setitem__:
                self._record(func, [args[0]], [args[0]])
            elif results := tensors_in(result):
                self._record(func, results, tensors_in((args, kwargs)))
            return result
        if self.replaces:
            args, kwargs = tree_map_only(Tensor, self._replacement, (args, dict(kwargs)))
        return func(*args, **kwargs)

    def _record(self, func: Any, results: list[Tensor], arguments: list[Tensor]) -> None:
        """Number new results, and arguments that were changed in place.

        The latter have numbers of their own, as a norm counts its batches in training alone.
        """
        given = set(map(id, arguments))
        new = [tensor for tensor in results if id(tensor) not in given]
        if new:
            self._results, self._changed = self._results + 1, 0
            self.functions.append(func)
        for leaf, tensor in enumerate(new):
            self._places[id(tensor)] = weakref.ref(tensor), Place(-1, self._results, leaf)
        for tensor in results:
            if id(tensor) in given and self._place_of(tensor) is None:
                self._changed += 1
                place = Place(-1, self._results, -self._changed)
                self._places[id(tensor)] = weakref.ref(tensor), place

    def _read(self, func: Callable[..., Any], number: Any) -> Any:
        """Return the number that the batch has read with this call; else the run's own one."""
        index = len(self.numbers)
        self.numbers.append((func, number))
        known, of_batch = self._of_batch[index] if index < len(self._of_batch) else (None, None)
        return of_batch if known is func else number

    def _place_of(self, tensor: Tensor) -> Place | None:
        reference, place = self._places.get(id(tensor), (None, None))
        return place if reference is not None and reference() is tensor else None

    def _replacement(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key not in self._replaced:
            if (place := self._place_of(tensor)) is None:
                return tensor
            assert self._rows is not None
            with plain_torch_functions():
                self._replaced[key] = tensor, self._rows(place, tensor)
        return self._replaced[key][1]
