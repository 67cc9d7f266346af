"""Product: a matrix times a sparse weight, of which one panel of rows is dense at a time.

A panel of the weight is made dense in scratch memory just before its product, and a panel of the
gradient is reduced to its kept entries just after, forward and backward. A panel takes no more
memory than the activations that it is multiplied with, or one tile: products with narrow ones are
slower, so a weight that is small beside them is one panel, and of a large one neither it nor its
gradient ever exists as a whole. Applies to ``torch.nn.functional.linear`` and to matrix products
with the weight on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse import kernels
from lightning_axosparse.sparse.layout import Layout, Tile, row_length
from lightning_axosparse.sparse.reading import autocast_dtype
from lightning_axosparse.sparse.scratch import scratch
from lightning_axosparse.sparse.transforms import batched, transforms_backward
from lightning_axosparse.sparse.weight import SparseWeight


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """``torch.nn.functional.linear``, where ``weight`` is as stored or the transposed of it."""
    if not _is_matrix(weight):
        return NotImplemented
    if weight.rows():
        return _applied(input, weight, bias, by_rows=True)
    transposed = weight.t()
    return _applied(input, transposed, bias, by_rows=False) if transposed.rows() else NotImplemented


def mm(input: Any, mat2: Any, **options: Any) -> Any:
    """``input @ mat2``, where ``mat2`` is a weight as stored or the transposed of it."""
    return linear(input, mat2.t()) if _is_matrix(mat2) and not options else NotImplemented


def matmul(input: Any, other: Any, **options: Any) -> Any:
    """:func:`mm` with the names of ``torch.matmul``."""
    return mm(input, other, **options)


def addmm(input: Any, mat1: Any, mat2: Any, **options: Any) -> Any:
    """``torch.addmm``, where ``mat2`` is a weight as stored or the transposed of it."""
    return linear(mat1, mat2.t(), input) if _is_matrix(mat2) and not options else NotImplemented


PANEL_ENTRIES = 2**24
"""The most entries of a panel of several tiles: wide enough for any product to be a fast one."""

WAYS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.mm: mm,
    torch.matmul: matmul,
    torch.addmm: addmm,
    Tensor.mm: mm,
    Tensor.matmul: matmul,
    Tensor.__matmul__: matmul,
    Tensor.addmm: addmm,
}
"""What is called in place of a torch function; parameters have the names that torch gives them."""


def _is_matrix(weight: Any) -> bool:
    sparse = isinstance(weight, SparseWeight) and not weight.is_meta
    return sparse and weight.dim() == 2 and weight.numel() > 0


def _applied(inputs: Any, weight: SparseWeight, bias: Any, by_rows: bool) -> Any:
    """The product, if the other operands are plain tensors that fit; it follows autocast."""
    width, features = weight.shape[::-1] if by_rows else weight.shape
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in (inputs, bias) if t is not None)
    if not plain or batched(inputs) or inputs.dim() == 0 or inputs.shape[-1] != width:
        return NotImplemented
    if bias is not None and bias.shape != (features,):
        return NotImplemented
    operands = [inputs, weight, bias]
    dtype = autocast_dtype(inputs.device)
    if dtype is not None:
        operands = [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in operands]
    if len({(t.dtype, t.device) for t in operands if t is not None}) > 1:
        return NotImplemented
    return _Product.apply(*operands, by_rows)  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """inputs @ weight.t() + bias (``by_rows``), or inputs @ weight + bias."""

    @staticmethod
    def forward(inputs: Tensor, weight: SparseWeight, bias: Tensor | None, by_rows: bool) -> Tensor:
        resident = weight.resident()
        if resident is not None:
            return F.linear(inputs, resident if by_rows else resident.t(), bias)
        flat = inputs.reshape(-1, inputs.shape[-1])
        values, layout = weight.unchanged(), weight.entries
        product = times_transposed if by_rows else times
        result = product(flat, values, layout, bias)
        return result.view(*inputs.shape[:-1], result.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        factor, weight, _, ctx.by_rows = inputs
        ctx.layout = weight.entries
        ctx.save_for_backward(factor, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_inputs = F.linear(gradient, weight.t() if ctx.by_rows else weight)
        if ctx.needs_input_grad[1]:
            for_weight = _gradient(ctx, inputs, gradient)
        if ctx.needs_input_grad[2]:
            for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0)
        return for_inputs, for_weight, for_bias, None


def _gradient(ctx: Any, inputs: Tensor, gradient: Tensor) -> Tensor:
    """The weight's gradient: its kept entries alone, unless it must be differentiable itself."""
    sides = (gradient, inputs) if ctx.by_rows else (inputs, gradient)
    left, right = (side.reshape(-1, side.shape[-1]) for side in sides)
    if transforms_backward(gradient):
        return left.t() @ right
    geometry = torch.empty(left.shape[1], right.shape[1], dtype=left.dtype, device="meta")
    return SparseWeight(outer(left, right, ctx.layout), ctx.layout, geometry)


def times_transposed(
    inputs: Tensor, values: Tensor, layout: Layout, bias: Tensor | None = None
) -> Tensor:
    """``inputs`` times the transposed weight: every panel gives some columns of the result.

    Args:
        inputs: shape ``(n, columns)``.
        values: the weight's kept entries, its shape seen as ``(rows, columns)``.
        layout: where they lie.
        bias: shape ``(rows,)``.

    Returns:
        A tensor of shape ``(n, rows)``.
    """
    panels = _panels(layout, inputs.shape[0])
    if len(panels) == 1:
        return F.linear(inputs, panels[0].dense(values), bias)
    result = inputs.new_empty(inputs.shape[0], layout.shape[0])
    for panel in panels:
        factor, part = panel.dense(values).t(), result[:, panel.rows]
        if bias is None:
            torch.mm(inputs, factor, out=part)
        else:
            torch.addmm(bias[panel.rows], inputs, factor, out=part)
    return result


def times(inputs: Tensor, values: Tensor, layout: Layout, bias: Tensor | None = None) -> Tensor:
    """``inputs`` times the weight: the results of the panels add up.

    In half precision every sum would be rounded: there a weight of several panels is made dense as
    a whole.

    Args:
        inputs: shape ``(n, rows)``.
        values: the weight's kept entries, its shape seen as ``(rows, columns)``.
        layout: where they lie.
        bias: shape ``(columns,)``.

    Returns:
        A tensor of shape ``(n, columns)``.
    """
    first, *others = _panels(layout, inputs.shape[0])
    if others and inputs.dtype.itemsize < 4:
        whole = layout.densify(values).view(-1, row_length(layout.shape))
        return F.linear(inputs, whole.t(), bias)
    result = F.linear(inputs[:, first.rows], first.dense(values).t(), bias)
    for panel in others:
        result.addmm_(inputs[:, panel.rows], panel.dense(values))
    return result


def outer(left: Tensor, right: Tensor, layout: Layout) -> Tensor:
    """The kept entries of ``left.t() @ right``.

    Args:
        left: shape ``(n, rows)``.
        right: shape ``(n, columns)``.
        layout: which entries of the result are kept, its shape seen as ``(rows, columns)``.

    Returns:
        A tensor of shape ``(layout.nnz,)``.
    """
    values = left.new_empty(layout.nnz)
    for panel in _panels(layout, left.shape[0]):
        out = panel.memory(left)
        torch.mm(left[:, panel.rows].t(), right, out=out.view(-1, right.shape[1]))
        panel.compress(out, values)
    return values


@dataclass(slots=True)
class _Panel:
    """Some tiles of a matrix, one after another, that are dense together."""

    layout: Layout
    tiles: list[Tile]

    @property
    def rows(self) -> slice:
        return slice(self.tiles[0].rows.start, self.tiles[-1].rows.stop)

    def memory(self, like: Tensor) -> Tensor:
        """Scratch memory for all entries, flat, of the dtype and on the device of ``like``."""
        first, last = self.tiles[0], self.tiles[-1]
        numel = last.start + last.numel - first.start
        return scratch.take("tile", numel, like.dtype, like.device)

    def dense(self, values: Tensor) -> Tensor:
        """The panel of a weight whose kept entries are ``values``: a matrix in scratch memory."""
        out = self.memory(values)
        for tile, part in self._parts(out):
            kernels.densify(self.layout, tile, values[tile.entries], part)
        return out.view(-1, row_length(self.layout.shape))

    def compress(self, dense: Tensor, values: Tensor) -> None:
        """Write the kept entries of the flat ``dense`` panel to where they belong in ``values``."""
        for tile, part in self._parts(dense):
            kernels.compress(self.layout, tile, part, values[tile.entries])

    def _parts(self, flat: Tensor) -> Iterable[tuple[Tile, Tensor]]:
        if len(self.tiles) == 1:
            return ((self.tiles[0], flat),)
        return zip(self.tiles, flat.split([tile.numel for tile in self.tiles]), strict=True)


def _panels(layout: Layout, n: int) -> list[_Panel]:
    """A weight in panels: as few as the ``n`` activations on its two sides leave room for."""
    tiles = layout.tiles
    if len(tiles) == 1:
        return [_Panel(layout, tiles)]
    room = min(n * (layout.shape[0] + row_length(layout.shape)), PANEL_ENTRIES)
    step = max(1, room // tiles[0].numel)
    step = -(-len(tiles) // -(-len(tiles) // step))  # in equal panels, as many as there would be
    return [_Panel(layout, tiles[first : first + step]) for first in range(0, len(tiles), step)]
