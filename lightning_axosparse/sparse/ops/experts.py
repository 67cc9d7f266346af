"""Multiplies by a stack of sparse matrices, such as the experts of a layer, and reads single ones.

``transformers`` and others keep the experts of a layer as one parameter of three dimensions. What
selects some of them gives a sparse weight of their part of the kept values, with which
``linear.py`` multiplies. Products with the whole stack run here, matrix by matrix. Only matrices
for which there are inputs are computed; the gradients of the others are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

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
    """Return what runs instead of a function of torch that returns views, such as ``select``.

    It returns NotImplemented for other weights, and if the views are not of whole matrices.
    """

    def select(input: Any, *args: Any, **kwargs: Any) -> Any:
        if (stack := _transposed_back(input)) is not None:
            return _each_transposed(select(stack, *args, **kwargs))
        if not _is_read_stack(input):
            return NotImplemented
        views = function(_numbers(input.entries.shape), *args, **kwargs)
        if isinstance(views, Tensor):
            return _matrices(input, views)
        found = [_matrices(input, view) for view in views]
        elsewhere = any(each is NotImplemented for each in found)
        return NotImplemented if elsewhere else tuple(found)

    return select


def transposing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs instead of a function that transposes, of whose result matrices are read."""

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
    first, *others = index if isinstance(index, tuple) else (index,)
    if (stack := _transposed_back(input)) is not None:
        if others and isinstance(first, Tensor):
            return NotImplemented
        found = _each_transposed(getitem(stack, first))
        whole = not others or found is NotImplemented
        return found if whole else found[(slice(None),) * (found.dim() - 2) + tuple(others)]
    if isinstance(first, slice):
        found, whole = _slices(input, first), not others
        others = [slice(None), *others]
        return found if whole or found is NotImplemented else found[tuple(others)]
    if isinstance(first, Tensor) and first.dim() == 0 and first.dtype in _INTEGERS:
        first = int(first)
    numbers = isinstance(first, Tensor) and first.dim() == 1 and first.dtype in _INDICES
    if not (numbers or type(first) is int) or not _is_read_stack(input):
        return NotImplemented
    matrices = input.entries.shape[0]
    if numbers:
        return NotImplemented if others else _chosen(input, first.tolist())
    if not -matrices <= first < matrices:
        return NotImplemented
    found = read_slices(input, first % matrices)
    return found[tuple(others)] if others else found


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
    found = bmm(input, other, **options)
    return mm(input, other, **options) if found is NotImplemented else found


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


def _chosen(weight: SparseWeight, numbers: list[int]) -> Any:
    """Return a stack of the slices with these numbers, which may repeat: a sparse weight."""
    values, layout = weight.source, weight.entries
    matrices = layout.shape[0]
    if not numbers or min(numbers) < -matrices or max(numbers) >= matrices:
        return NotImplemented
    assert values is not None
    numbers = [number % matrices for number in numbers]
    pieces = values.split([end - begin for begin, end in pairwise(layout.edges)])
    chosen = torch.cat([pieces[number] for number in numbers])
    form = DenseForm(weight.dtype, backend=weight.backend)
    return sparse_weight(chosen, layout.joined(numbers), form, type(weight))


_slices = selecting(Tensor.__getitem__)
_INDICES = torch.int32, torch.int64
_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


def _is_read_stack(weight: Any) -> bool:
    read = isinstance(weight, SparseWeight) and weight.source is not None
    return read and is_stack(weight.entries.shape) and not weight.is_meta


def _transposed_back(weight: Any) -> SparseWeight | None:
    """Return the read stack of which a weight is what ``transposing`` gives; None of any other."""
    if not isinstance(weight, SparseWeight) or weight.source is None or _is_stored(weight):
        return None
    stack = cast(SparseWeight, weight.mT)
    stack.source = weight.source
    return stack


def _each_transposed(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(each.mT for each in found)
    return found if found is NotImplemented else found.mT


def _is_stored(weight: SparseWeight) -> bool:
    """Return whether a weight is a stack as it is stored, and no other view of it."""
    shape = weight.entries.shape
    whole = weight.shape == shape and weight.is_contiguous() and weight.storage_offset() == 0
    return whole and is_stack(shape)


@lru_cache(64)
def _numbers(shape: torch.Size) -> Tensor:
    """Return a tensor of this shape in whose memory each matrix takes one place, without values."""
    return torch.empty((shape[0], 1, 1), device="meta").expand(shape)


def _matrices(weight: SparseWeight, view: Tensor) -> Any:
    """Return those matrices of a stack of which ``view`` is, as a view of ``_numbers``."""
    if view.shape[-2:] != weight.shape[1:] or view.stride()[-2:] != (0, 0):
        return NotImplemented
    first = int(view.storage_offset())
    if view.dim() == 2:
        return read_slices(weight, first)
    consecutive = view.dim() == 3 and len(view) > 0 and (len(view) == 1 or view.stride(0) == 1)
    return read_slices(weight, first, first + len(view)) if consecutive else NotImplemented


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


def _groups(layout: Layout, edges: Sequence[int]) -> Iterator[tuple[int, slice, Layout, slice]]:
    """Yield the number, the rows, the layout and the kept entries of each matrix with inputs."""
    for number, (begin, end) in enumerate(pairwise(edges)):
        if begin < end:
            entries = slice(layout.edges[number], layout.edges[number + 1])
            yield number, slice(begin, end), layout.part(number), entries


class _Grouped(torch.autograd.Function):
    """Products with the matrices of a stack as a function of all inputs and the stack."""

    @staticmethod
    def forward(
        inputs: Tensor, weight: SparseWeight, edges: Sequence[int], by_rows: bool
    ) -> Tensor:
        features = weight.shape[1 if by_rows else 2]
        return _products(inputs, weight, edges, by_rows, inputs.new_zeros(len(inputs), features))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        factor, weight, ctx.edges, ctx.by_rows = inputs
        ctx.layout, ctx.backend = weight.entries, weight.backend
        ctx.save_for_backward(factor, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        for_inputs = for_weight = None
        # Hooks on saved tensors may return the weight as a plain dense tensor.
        if backward_transformed(gradient) or not isinstance(weight, SparseWeight):
            return *_dense_gradients(ctx, gradient, inputs, weight), None, None
        if ctx.needs_input_grad[0]:
            memory = torch.zeros_like(inputs)
            for_inputs = _products(gradient, weight, ctx.edges, not ctx.by_rows, memory)
        if ctx.needs_input_grad[1]:
            values = inputs.new_zeros(ctx.layout.nnz)
            for _, rows, layout, entries in _groups(ctx.layout, ctx.edges):
                factors = outer_factors(inputs[rows], gradient[rows], ctx.by_rows)
                values[entries] = sddmm(*factors, layout, ctx.backend, values.dtype)
            for_weight = SparseWeight(values, ctx.layout)
        return for_inputs, for_weight, None, None


def _products(
    inputs: Tensor, weight: SparseWeight, edges: Sequence[int], by_rows: bool, result: Tensor
) -> Tensor:
    weight.check_unchanged()
    for _, rows, layout, entries in _groups(weight.entries, edges):
        kept = weight.kept[entries]
        result[rows] = multiply(inputs[rows], kept, layout, None, weight.backend, by_rows)
    return result


def _dense_gradients(
    ctx: Any, gradient: Tensor, inputs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both gradients as functions that can be differentiated."""
    for_inputs, for_weight = [], []
    for matrix, begin, end in zip(weight, ctx.edges, ctx.edges[1:], strict=False):
        rows = slice(begin, end)
        for_inputs.append(F.linear(gradient[rows], matrix.t() if ctx.by_rows else matrix))
        left, right = outer_factors(inputs[rows], gradient[rows], ctx.by_rows)
        for_weight.append(left.t() @ right)
    beyond = torch.zeros_like(inputs[ctx.edges[-1] :])
    return torch.cat([*for_inputs, beyond]), torch.stack(for_weight)
