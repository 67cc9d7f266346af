"""Multiplies by a stack of sparse matrices, such as the experts of a layer, and reads single ones.

``transformers`` and others store the experts of a layer as one parameter of three dimensions.
Selecting some of them gives a sparse weight of their part of the values, by which ``linear.py``
multiplies. Products with the whole stack run here, matrix by matrix. Only matrices for which there
are inputs are computed; the gradients of the others are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_axosparse.sparse.ops.linear import eligible, mm, multiply, outer_factors, sddmm
from lightning_axosparse.sparse.store.layout import Layout, is_stack
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from lightning_axosparse.support.torch_internals import (
    apply_untransformed,
    backward_transformed,
    version_of,
)


def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a function of torch that returns views, such as ``select``.

    It returns NotImplemented for other weights, and if the views are not of whole matrices.
    """

    def select(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_read_stack(input):
            return NotImplemented
        views = function(_numbers(input.shape), *args, **kwargs)
        if isinstance(views, Tensor):
            return _matrices_in_view(input, views)
        matrices = tuple(_matrices_in_view(input, view) for view in views)
        whole = all(matrix is not NotImplemented for matrix in matrices)
        return matrices if whole else NotImplemented

    return select


def transposing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a function that transposes a stack; the result is read again."""

    def transpose(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_read_stack(input):
            return NotImplemented
        view = function(input, *args, **kwargs)
        if isinstance(view, SparseWeight) and _is_stored(cast(SparseWeight, view.mT)):
            view.source = input.source
        return view

    return transpose


def getitem(input: Any, index: Any) -> Any:
    """Compute ``input[index]`` where it begins with a number, numbers or a slice of matrices."""
    if not _is_read_stack(input):
        return NotImplemented
    first, *others = index if isinstance(index, tuple) else (index,)
    dimensions = first.dim() if isinstance(first, Tensor) else None
    if dimensions == 1 and first.dtype in (torch.int32, torch.int64):
        return NotImplemented if others else _selected_matrices(input, first.tolist())
    if not (isinstance(first, slice) or type(first) is int or dimensions == 0):
        return NotImplemented
    matrices = _matrices_in_view(input, _numbers(input.shape)[first])
    if matrices is NotImplemented or not others:
        return matrices
    return matrices[(slice(None),) * (matrices.dim() - 2) + tuple(others)]


def bmm(input: Any, mat2: Any, **options: Any) -> Any:
    """Compute ``torch.bmm`` with a read stack, as stored or transposed, on either side."""
    if options or not isinstance(mat2, Tensor) or not isinstance(input, Tensor):
        return NotImplemented
    if input.dim() != 3 or mat2.dim() != 3 or len(input) != len(mat2):
        return NotImplemented
    if not isinstance(mat2, SparseWeight):
        product = bmm(mat2.mT, input.mT) if isinstance(input, SparseWeight) else NotImplemented
        return product if product is NotImplemented else product.mT
    rows = input.shape[1]
    product = _grouped(input.flatten(0, 1), mat2, range(0, len(mat2) * rows + 1, rows or 1), True)
    return product if product is NotImplemented else product.view(len(mat2), rows, product.shape[1])


def matmul(input: Any, other: Any, **options: Any) -> Any:
    """Compute ``torch.matmul`` with a read weight; one matrix of inputs is for all of a stack."""
    stack = isinstance(other, SparseWeight) and other.dim() == 3
    if stack and isinstance(input, Tensor) and input.dim() == 2:
        input = input.expand(len(other), *input.shape)
    product = bmm(input, other, **options)
    return mm(input, other, **options) if product is NotImplemented else product


def grouped_mm(
    input: Any,
    mat2: Any,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Compute ``torch.nn.functional.grouped_mm`` with a read stack, as stored or transposed.

    Rows after the last group are zero.
    """
    stack = isinstance(mat2, SparseWeight) and mat2.dim() == 3
    if not stack or offs is None or bias is not None or out_dtype is not None or input.dim() != 2:
        return NotImplemented
    return _grouped(input, mat2, [0, *offs.tolist()], autocasts=False)


class _Pieces:
    """The unpruned values of each matrix, split by one node of autograd.

    A loop over experts reads their weight for each expert. If every read added a node, the
    gradients of all experts' values would be added up for each expert. So the graphs of matrices
    refer to the pieces that they come from, and reads use these until the values change.
    """

    def __init__(self, source: Tensor, layout: Layout) -> None:
        self._source, self._state = source, _state(source)
        self.values = _split(source, layout)

    def are_of(self, source: Tensor) -> bool:
        return self._source is source and self._state == _state(source)


_latest: WeakValueDictionary[Layout, _Pieces] = WeakValueDictionary()
"""Of the graphs that are alive; layouts are compared by identity."""


def _state(values: Tensor) -> tuple[int, int]:
    return version_of(values), values.data_ptr()


def _split(values: Tensor, layout: Layout) -> Sequence[Tensor]:
    sizes = [end - begin for begin, end in pairwise(layout.edges)]
    pieces: Sequence[Tensor] = values.split(sizes)
    return pieces


def _matrix(weight: SparseWeight, number: int) -> Tensor:
    """Return a matrix of a stack: a sparse weight of its part of the values."""
    values, layout = cast(Tensor, weight.source), weight.sparse_layout
    part = layout.part(number)
    if not (torch.is_grad_enabled() and values.requires_grad):
        return _of_stack(weight, values[slice(*layout.edges[number : number + 2])], part)
    pieces = _latest.get(layout)
    if pieces is None or not pieces.are_of(values):
        pieces = _latest[layout] = _Pieces(values, layout)
    matrix = _of_stack(weight, pieces.values[number], part)
    node: Any = matrix.grad_fn
    node.pieces = pieces
    return matrix


def _matrices(weight: SparseWeight, first: int, last: int) -> Tensor:
    """Return the matrices from ``first`` to ``last``, a sparse weight of a stack."""
    layout = weight.sparse_layout
    values = cast(Tensor, weight.source)[layout.edges[first] : layout.edges[last]]
    return _of_stack(weight, values, layout.part(first, last))


def _selected_matrices(weight: SparseWeight, numbers: list[int]) -> Any:
    """Return a stack of the matrices with these numbers, which may repeat."""
    layout, count = weight.sparse_layout, len(weight)
    if not numbers or min(numbers) < -count or max(numbers) >= count:
        return NotImplemented
    numbers = [number % count for number in numbers]
    pieces = _split(cast(Tensor, weight.source), layout)
    values = torch.cat([pieces[number] for number in numbers])
    return _as_read(weight, _of_stack(weight, values, layout.joined(numbers)))


def _of_stack(weight: SparseWeight, values: Tensor, layout: Layout) -> Tensor:
    """Return the weight of some of a stack's values, without a resident copy."""
    form = DenseForm(weight.dtype, backend=weight.backend)
    return sparse_weight(values, layout, form, type(weight))


def _is_read_stack(weight: Any) -> bool:
    """Return whether a weight is a stack as it was read, or transposed by ``transposing``."""
    read = isinstance(weight, SparseWeight) and weight.source is not None
    return read and is_stack(weight.sparse_layout.shape) and not weight.is_meta


def _is_stored(weight: SparseWeight) -> bool:
    """Return whether a weight is a stack as it is stored, and no other view of it."""
    shape = weight.sparse_layout.shape
    whole = weight.shape == shape and weight.is_contiguous() and weight.storage_offset() == 0
    return whole and is_stack(shape)


def _as_read(weight: SparseWeight, matrices: Tensor) -> Tensor:
    """Return matrices of a read stack, transposed if the stack is."""
    return matrices if _is_stored(weight) else matrices.mT


@lru_cache(64)
def _numbers(shape: torch.Size) -> Tensor:
    """Return a meta tensor of this shape, each of whose matrices is one number, expanded."""
    return torch.empty((shape[0], 1, 1), device="meta").expand(shape)


def _matrices_in_view(weight: SparseWeight, view: Tensor) -> Any:
    """Return the matrices of a read stack that ``view``, a view of ``_numbers``, has."""
    if view.shape[-2:] != weight.shape[1:] or view.stride()[-2:] != (0, 0):
        return NotImplemented
    first = int(view.storage_offset())
    if view.dim() == 2:
        return _as_read(weight, _matrix(weight, first))
    if view.dim() != 3 or not len(view) or (len(view) > 1 and view.stride(0) != 1):
        return NotImplemented
    return _as_read(weight, _matrices(weight, first, first + len(view)))


def _grouped(input: Tensor, weight: SparseWeight, edges: Sequence[int], autocasts: bool) -> Any:
    """Multiply the rows of ``input`` between two edges by the matrix of the same number."""
    by_rows = not _is_stored(weight)
    stored: Any = weight.mT if by_rows else weight
    if not _is_stored(stored):
        return NotImplemented
    shape = stored.shape[1:]
    operands = eligible(input, None, stored, shape, stored.dtype, by_rows, autocasts)
    if operands is None:
        return NotImplemented
    inputs, _, dtype = operands
    return apply_untransformed(_Grouped, inputs, stored.to(dtype), edges, by_rows)


def _groups(layout: Layout, edges: Sequence[int]) -> Iterator[tuple[slice, Layout, slice]]:
    """Yield the rows, the layout and the unpruned entries of each matrix with inputs."""
    for number, (begin, end) in enumerate(pairwise(edges)):
        if begin < end:
            entries = slice(layout.edges[number], layout.edges[number + 1])
            yield slice(begin, end), layout.part(number), entries


class _Grouped(torch.autograd.Function):
    """Products with the matrices of a stack as a function of all inputs and the stack."""

    @staticmethod
    def forward(
        inputs: Tensor, weight: SparseWeight, edges: Sequence[int], by_rows: bool
    ) -> Tensor:
        return _products(inputs, weight, edges, by_rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        factor, weight, ctx.edges, ctx.by_rows = inputs
        ctx.layout, ctx.backend = weight.sparse_layout, weight.backend
        ctx.save_for_backward(factor, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs = for_weight = None
        # Hooks on saved tensors may return the weight as a plain dense tensor.
        if backward_transformed(gradient) or not isinstance(weight, SparseWeight):
            return *_dense_gradients(ctx, gradient, inputs, weight), None, None
        if ctx.needs_input_grad[0]:
            for_inputs = _products(gradient, weight, ctx.edges, not ctx.by_rows)
        if ctx.needs_input_grad[1]:
            values = inputs.new_zeros(ctx.layout.nnz)
            for rows, layout, entries in _groups(ctx.layout, ctx.edges):
                factors = outer_factors(inputs[rows], gradient[rows], ctx.by_rows)
                values[entries] = sddmm(*factors, layout, ctx.backend, values.dtype)
            for_weight = SparseWeight(values, ctx.layout)
        return for_inputs, for_weight, None, None


def _products(inputs: Tensor, weight: SparseWeight, edges: Sequence[int], by_rows: bool) -> Tensor:
    weight.check_unchanged()
    result = inputs.new_zeros(len(inputs), weight.shape[1 if by_rows else 2])
    for rows, layout, entries in _groups(weight.sparse_layout, edges):
        values = weight.stored_values[entries]
        result[rows] = multiply(inputs[rows], values, layout, None, weight.backend, by_rows)
    return result


def _dense_gradients(
    ctx: Any, gradient: Tensor, inputs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both gradients as differentiable functions of their operands."""
    for_inputs, for_weight = [], []
    for matrix, (begin, end) in zip(weight, pairwise(ctx.edges), strict=True):
        rows = slice(begin, end)
        for_inputs.append(F.linear(gradient[rows], matrix.t() if ctx.by_rows else matrix))
        left, right = outer_factors(inputs[rows], gradient[rows], ctx.by_rows)
        for_weight.append(left.t() @ right)
    beyond = torch.zeros_like(inputs[ctx.edges[-1] :])
    return torch.cat([*for_inputs, beyond]), torch.stack(for_weight)
