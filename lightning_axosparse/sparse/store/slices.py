"""Reads slices along a stack's first dimension, such as experts, as sparse weights of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support.torch_internals import version_of


def read_slices(weight: SparseWeight, first: int, last: int | None = None) -> Tensor:
    """Return some slices of a weight: a sparse weight of the part of its values that they keep.

    It has no resident copy, so one of the whole weight is not filled for it.

    Args:
        weight: as it was read, a stack of matrices.
        first: the first slice.
        last: the one after the last; None: the slice ``first`` alone, a matrix.
    """
    values, layout = weight.source, weight.entries
    assert values is not None
    form, kind = DenseForm(weight.dtype, backend=weight.backend), type(weight)
    part = layout.part(first, last)
    if last is not None or not (torch.is_grad_enabled() and values.requires_grad):
        begin, end = layout.edges[first], layout.edges[last or first + 1]
        return sparse_weight(values[begin:end], part, form, kind)
    pieces = _pieces(values, layout)
    matrix = sparse_weight(pieces.values[first], part, form, kind)
    node: Any = matrix.grad_fn
    node.pieces = pieces
    return matrix


def read_chosen(weight: SparseWeight, numbers: Sequence[int]) -> Tensor:
    """Return a stack of the slices with these numbers, which may repeat: a sparse weight.

    Args:
        weight: as it was read, a stack of matrices.
        numbers: of slices, at least one.
    """
    values, layout = weight.source, weight.entries
    assert values is not None
    form = DenseForm(weight.dtype, backend=weight.backend)
    pieces = values.split([end - begin for begin, end in pairwise(layout.edges)])
    chosen = torch.cat([pieces[number] for number in numbers])
    return sparse_weight(chosen, layout.joined(numbers), form, type(weight))


class _Pieces:
    """The kept values of each slice, split by one node of autograd.

    A loop over experts reads their weight anew for each. If each read had a node of its own, the
    gradients of all experts' values would be added up for each expert. So the graphs of slices keep
    the pieces that they come from, and reads use these until the values change.
    """

    def __init__(self, source: Tensor, layout: Layout) -> None:
        self._source, self._state = source, _state(source)
        self.values = source.split([end - begin for begin, end in pairwise(layout.edges)])

    def are_of(self, source: Tensor) -> bool:
        return self._source is source and self._state == _state(source)


def _pieces(values: Tensor, layout: Layout) -> _Pieces:
    known = _latest.get(layout)
    pieces = None if known is None else known()
    if pieces is None or not pieces.are_of(values):
        pieces = _Pieces(values, layout)
        _latest[layout] = ref(pieces)
    return pieces


# Of the graphs that are alive; layouts are compared by identity.
_latest: WeakKeyDictionary[Layout, ref[_Pieces]] = WeakKeyDictionary()


def _state(values: Tensor) -> tuple[int, int]:
    return version_of(values), values.data_ptr()
