"""Looks up rows of a sparse embedding on CPU, without the other rows, where they have segments."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse.kernels import kernel_module
from lightning_axosparse.sparse.ops.products import can_read
from lightning_axosparse.sparse.store.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support.torch_internals import backward_transformed, transformed


def embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Compute ``torch.nn.functional.embedding`` with a read weight, as stored.

    Returns:
        The rows; NotImplemented on other devices than the CPU, for rows without segments of their
        own, renormalisation, gradients scaled by frequency or sparse gradients, and indices out of
        range: torch's own function runs then.
    """
    stored = isinstance(weight, SparseWeight) and weight.has_whole_rows()
    if (
        not stored
        or not can_read(weight.sparse_layout, weight.stored_values)
        or type(input) is not Tensor
        or not input.is_cpu
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


class _Lookup(torch.autograd.Function):
    """The rows ``indices`` of a read weight."""

    @staticmethod
    def forward(indices: Tensor, weight: SparseWeight, padding: int | None) -> Tensor:
        if weight.dense_copy is not None:
            return weight.operand()[indices]
        assert isinstance(weight.sparse_layout, SegmentLayout)
        loops, values = kernel_module("segments"), weight.unpruned_values()
        rows: Tensor = loops.take_rows(indices.reshape(-1), values, weight.sparse_layout.rows)
        return rows.view(*indices.shape, rows.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        indices, weight, ctx.padding = inputs
        ctx.layout, ctx.rows = weight.sparse_layout, len(weight)
        ctx.save_for_backward(indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (indices,) = ctx.saved_tensors
        if backward_transformed(gradient):
            padding = -1 if ctx.padding is None else ctx.padding
            dense = torch.ops.aten.embedding_dense_backward
            return None, dense(gradient, indices, ctx.rows, padding, False), None
        rows = gradient.reshape(-1, gradient.shape[-1])
        loops, numbers = kernel_module("segments"), indices.reshape(-1)
        values = loops.add_rows(numbers, rows, ctx.layout.rows, ctx.padding)
        geometry = torch.empty(ctx.rows, rows.shape[1], dtype=rows.dtype, device="meta")
        return None, SparseWeight(values, ctx.layout, geometry), None


def look_up_rows(
    layer: nn.Embedding, indices: Tensor, values: Tensor, layout: Layout, form: DenseForm
) -> Tensor | None:
    """Look up rows of an embedding's unpruned values without gradients; None if not possible.

    A weight that is read without gradients does not call :func:`embedding`
    (``torch_functions.OverridingWeight``), and would be dense as a whole for each token.
    """
    if torch.is_grad_enabled() or transformed():
        return None
    options = layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse
    rows = embedding(indices, sparse_weight(values, layout, form), layer.padding_idx, *options)
    return rows if isinstance(rows, Tensor) else None


@cache
def load_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a layer needs them."""
    layout = layout_of(torch.ones(1, 64, dtype=torch.bool, device="cpu"), "segments")
    assert isinstance(layout, SegmentLayout)
    indices = torch.zeros(1, dtype=torch.int64, device="cpu")
    values = torch.zeros(64, dtype=torch.float32, device="cpu")
    loops = kernel_module("segments")
    loops.add_rows(indices, loops.take_rows(indices, values, layout.rows), layout.rows)
