"""Lookup: rows of a sparse embedding, of which one tile is dense at a time.

Applies on CPU, to ``torch.nn.functional.embedding`` with a dense gradient and no renormalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse import kernels
from lightning_axosparse.sparse.layout import Layout, Tile, row_length
from lightning_axosparse.sparse.scratch import scratch
from lightning_axosparse.sparse.transforms import transforms_backward
from lightning_axosparse.sparse.weight import SparseWeight


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``torch.nn.functional.embedding``, where ``weight`` is as stored."""
    applies = isinstance(weight, SparseWeight) and weight.is_cpu and weight.rows()
    if (
        not applies
        or type(input) is not Tensor
        or max_norm is not None
        or scale_grad_by_freq
        or sparse
    ):
        return NotImplemented
    rows = len(weight)
    if input.numel() and not 0 <= int(input.min()) <= int(input.max()) < rows:
        return NotImplemented
    padding = None if padding_idx is None else padding_idx % rows
    return _Lookup.apply(input, weight, padding)  # type: ignore[no-untyped-call]


WAYS: dict[Callable[..., Any], Callable[..., Any]] = {F.embedding: embedding}
"""What is called in place of a torch function."""


class _Lookup(torch.autograd.Function):
    """Rows ``indices`` of the weight."""

    @staticmethod
    def forward(indices: Tensor, weight: SparseWeight, padding: int | None) -> Tensor:
        resident = weight.resident()
        if resident is not None:
            return resident[indices]
        rows = take_rows(indices.reshape(-1), weight.unchanged(), weight.entries)
        return rows.view(*indices.shape, rows.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        indices, weight, ctx.padding = inputs
        ctx.layout, ctx.rows = weight.entries, len(weight)
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (indices,) = ctx.saved_tensors
        if transforms_backward(gradient):
            padding = -1 if ctx.padding is None else ctx.padding
            dense = torch.ops.aten.embedding_dense_backward
            return None, dense(gradient, indices, ctx.rows, padding, False), None
        rows = gradient.reshape(-1, gradient.shape[-1])
        values = add_rows(indices.reshape(-1), rows, ctx.layout, ctx.padding)
        geometry = torch.empty(ctx.rows, rows.shape[1], dtype=rows.dtype, device="meta")
        return None, SparseWeight(values, ctx.layout, geometry), None


def take_rows(indices: Tensor, values: Tensor, layout: Layout) -> Tensor:
    """The dense rows ``indices`` (shape ``(n,)``) of a weight: shape ``(n, columns)``."""
    result = values.new_empty(len(indices), row_length(layout.shape))
    for tile, places in _visited(indices, layout):
        rows = _scratch_rows(layout, tile, values)
        kernels.densify(layout, tile, values[tile.entries], rows.view(-1))
        result[places] = rows[indices[places] - tile.rows.start]
    return result


def add_rows(indices: Tensor, rows: Tensor, layout: Layout, padding: int | None = None) -> Tensor:
    """The kept entries of zeros to whose rows ``indices`` the ``rows`` were added.

    Args:
        indices: shape ``(n,)``.
        rows: shape ``(n, columns)``.
        layout: which entries are kept.
        padding: an index whose rows are left out.
    """
    values = rows.new_zeros(layout.nnz)
    if padding is not None:
        rows, indices = rows[indices != padding], indices[indices != padding]
    for tile, places in _visited(indices, layout):
        sums = _scratch_rows(layout, tile, rows).zero_()
        sums.index_add_(0, indices[places] - tile.rows.start, rows[places])
        kernels.compress(layout, tile, sums.view(-1), values[tile.entries])
    return values


def _visited(indices: Tensor, layout: Layout) -> Iterator[tuple[Tile, Tensor]]:
    """The tiles in which some of the ``indices`` lie, and which of them do."""
    for tile in layout.tiles:
        inside = (indices >= tile.rows.start) & (indices < tile.rows.stop)
        places = inside.nonzero().squeeze(1)
        if len(places):
            yield tile, places


def _scratch_rows(layout: Layout, tile: Tile, like: Tensor) -> Tensor:
    rows = scratch.take("tile", tile.numel, like.dtype, like.device)
    return rows.view(-1, row_length(layout.shape))
