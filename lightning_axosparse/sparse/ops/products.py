"""Multiplies by the unpruned values of a sparse weight on a CPU, without a dense one.

The loops are in ``kernels/products.py``. ``benchmarks/overhead/products.py`` measures them against
the panels of ``panels.py`` and against a dense weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.backend import Backend, Processor
from lightning_axosparse.sparse.kernels import (
    LANES,
    ROWS_OF_SUMS,
    SEGMENT,
    Weight,
    kernel_module,
)
from lightning_axosparse.sparse.store.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import Layout, block_rows
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.support.memory import reusable_empty, reusable_zeros
from lightning_axosparse.support.threads import run_in_threads

Densities = Mapping[str, float]
"""The largest density at which each product runs on unpruned values.

"one_token" is the one of ``spmm_t`` and ``spmm`` with a single token.
"""

_USUAL: Densities = {"spmm_t": 0.5, "spmm": 0.4, "sddmm": 0.4, "one_token": 1.0}
_QUARTER: Densities = {"spmm_t": 0.25, "spmm": 0.25, "sddmm": 0.25, "one_token": 1.0}
_PAIRED: Densities = {"spmm_t": 0.4, "spmm": 0.25, "sddmm": 0.3, "one_token": 1.0}
_ALWAYS: Densities = dict.fromkeys(_USUAL, 1.0)
_NEVER: Densities = dict.fromkeys(_USUAL, -1.0)

MAX_DENSITY: Mapping[Processor, tuple[Densities, Densities]] = {
    "dense": (_NEVER, _NEVER),
    "few": (_QUARTER, _NEVER),
    "matrix": (_USUAL, _NEVER),
    "bfloat16": (_USUAL, _PAIRED),
    "float32": (_USUAL, _USUAL),
}
"""The densities up to which these products are faster than panels, in float32 and in 16 bits.

Panels take longer than a dense weight, too, by the time to fill them. Other sizes of weights and
other numbers of tokens, if several, change the ratio of the two, but not which one is faster.
"""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of products that can run here.

They run in float32, and results of 16 bits are rounded; where the processor multiplies bfloat16,
only the sums are float32.
"""

_NO_BIAS: Any = np.empty(0, np.float32)


def can_read(layout: Layout, operand: Tensor) -> TypeGuard[SegmentLayout]:
    """Return whether compiled loops can read a sparse weight.

    Args:
        layout: the layout of the weight.
        operand: its unpruned values, or another operand.
    """
    return operand.is_cpu and isinstance(layout, SegmentLayout) and layout.has_row_segments


def should_run(
    layout: Layout, product: str, backend: Backend, operand: Tensor
) -> TypeGuard[SegmentLayout]:
    """Return whether a product with a sparse weight should run on its unpruned values.

    Args:
        layout: the layout of the weight.
        product: a key of :data:`Densities`.
        backend: how products with the weight run.
        operand: the values, or another operand, of the dtype in which the product runs.
    """
    if not can_read(layout, operand):
        return False
    return layout.nnz <= max_density(backend, operand.dtype)[product] * layout.shape.numel()


def max_density(backend: Backend, dtype: torch.dtype) -> Densities:
    """Return the densities up to which products of a dtype should run here, on a CPU.

    Args:
        backend: how products with the weight run.
        dtype: the dtype of the operands, after autocast.
    """
    if dtype not in DTYPES or backend.compute == "dense":
        return _NEVER
    if backend.compute == "sparse":
        return _ALWAYS
    in_float32, in_16_bits = MAX_DENSITY[backend.processor]
    return in_float32 if dtype == torch.float32 else in_16_bits


@cache
def load_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a product needs them.

    The first time on a machine that takes some seconds and the memory of a compiler, which a step
    with its activations should not have to find.
    """
    mask = torch.ones(1, 64, dtype=torch.bool, device="cpu")
    layout = layout_of(mask, "segments")
    assert isinstance(layout, SegmentLayout)
    inputs = torch.zeros(256, 64, dtype=torch.float32, device="cpu")
    for tokens in (1, 2, _tokens_of_a_transpose(inputs)):
        values = sddmm(inputs[:tokens, :1], inputs[:tokens], layout)
        spmm(spmm_t(inputs[:tokens], values, layout), values, layout)
    layout.densify(values)  # for products on panels, where the density is too high
    inputs = inputs.bfloat16()
    if _multiplied_as_bfloat16(inputs):
        values = sddmm(inputs[:, :1], inputs, layout)
        spmm(spmm_t(inputs, values, layout), values, layout)


def spmm_t(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the transposed weight.

    Args:
        inputs: shape ``(..., columns)``, float32 or of 16 bits, on CPU.
        values: unpruned values of the weight, which has the shape ``(rows, columns)``; for a single
            token int8, too.
        layout: the positions of the values.
        bias: shape ``(rows,)``.

    Returns:
        A tensor of shape ``(..., rows)``.
    """
    number = inputs.shape[:-1].numel()
    flat = _flat_for(inputs, number)
    weight, source = Weight(*layout.read_by_loops, flat(values)), flat(inputs)
    result = reusable_empty((*inputs.shape[:-1], weight.height))
    shared = bias_array(bias), as_array(result)

    def part(first: int, last: int) -> None:
        rows = weight, (first, last), entries_before(layout, first)
        if number == 1:
            kernel_module("one_token").one_token_spmm_t(source, *rows, *shared)
        else:
            memory = _packed(weight.width, source.dtype)
            kernel_module("products").spmm_t(source, number, *rows, *shared, *memory)

    run_in_threads(part, weight.height, block_rows(layout.shape), number * layout.nnz)
    return _like(result, inputs)


def spmm(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the weight.

    Args:
        inputs: shape ``(..., rows)``, float32 or of 16 bits, on CPU.
        values: unpruned values of the weight, which has the shape ``(rows, columns)``.
        layout: the positions of the values.
        bias: shape ``(columns,)``.

    Returns:
        A tensor of shape ``(..., columns)``.
    """
    number = inputs.shape[:-1].numel()
    if number >= _tokens_of_a_transpose(inputs):
        return _transposed_spmm_t(inputs, values, layout, bias)
    weight = kernel_weight(layout, values)
    result = reusable_empty((*inputs.shape[:-1], weight.width))
    source, shared = as_array(inputs), (bias_array(bias), as_array(result))
    if number == 1:
        kernel_module("one_token").one_token_spmm(source, weight, *shared)
        return _like(result, inputs)

    def part(first: int, last: int) -> None:
        kernel_module("products").spmm(
            source, (first, last), weight, *shared, _memory(weight.width)
        )

    tokens_of_a_vector = LANES // 2
    run_in_threads(part, number, tokens_of_a_vector, number * layout.nnz)
    return _like(result, inputs)


ENTRIES_OF_A_TRANSPOSE = 2**20
"""About so many entries are transposed at a time: larger weights in several parts."""


def _tokens_of_a_transpose(inputs: Tensor) -> int:
    """Return with how many tokens products save the time that transposing a weight takes.

    :func:`spmm` adds each product to another sum, of which a processor stores half as many as it
    reads.
    """
    return 128 if _multiplied_as_bfloat16(inputs) else 256


def _transposed_spmm_t(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None
) -> Tensor:
    """Compute :func:`spmm` as the :func:`spmm_t` of the transpose, to the same bits in float32."""
    number = inputs.shape[:-1].numel()
    flat = _flat_for(inputs, number)
    weight, source = Weight(*layout.read_by_loops, flat(values)), flat(inputs)
    result = reusable_empty((*inputs.shape[:-1], weight.width))
    shared = bias_array(bias), as_array(result)
    segments = -(-weight.width // SEGMENT)
    by_segment = weight.counts.reshape(weight.height, segments)
    columns = max(ENTRIES_OF_A_TRANSPOSE * segments // max(layout.nnz, 1), 1) * SEGMENT

    def part(first: int, last: int) -> None:
        for begin in range(first, last, columns):
            end = min(begin + columns, last)
            nnz = by_segment[:, begin // SEGMENT : -(-end // SEGMENT)].sum()
            transpose = (begin, end), _memory_of_transpose(int(nnz), source.dtype)
            memory = _packed(weight.height, source.dtype)
            loop = kernel_module("products").transposed_spmm_t
            loop(source, number, weight, *transpose, *shared, *memory)

    run_in_threads(part, weight.width, ROWS_OF_SUMS, number * layout.nnz)
    return _like(result, inputs)


def sddmm(left: Tensor, right: Tensor, layout: SegmentLayout) -> Tensor:
    """Return the unpruned entries of ``left.t() @ right``.

    Args:
        left: shape ``(n, rows)``, float32 or of 16 bits, on CPU.
        right: shape ``(n, columns)``, likewise.
        layout: the layout of the result, which has the shape ``(rows, columns)``.

    Returns:
        A tensor of shape ``(layout.nnz,)``.
    """
    tokens, result = left.shape[0], reusable_zeros((layout.nnz,))
    flat = _flat_for(left, tokens)
    factors, weight = (flat(left), flat(right)), kernel_weight(layout, result)

    def part(first: int, last: int) -> None:
        rows = (first, last), entries_before(layout, first)
        packed = _memory(weight.width).view(factors[0].dtype)
        kernel_module("products").sddmm(*factors, tokens, weight, *rows, packed)

    run_in_threads(part, weight.height, block_rows(layout.shape), tokens * layout.nnz)
    return _like(result, left)


def kernel_weight(layout: SegmentLayout, values: Tensor) -> Weight:
    """Return a sparse weight in the form that compiled loops read, in float32."""
    return Weight(*layout.read_by_loops, as_array(values))


def _multiplied_as_bfloat16(operand: Tensor) -> bool:
    return operand.dtype == torch.bfloat16 and kernel_module("products").HAS_BFLOAT16


def _flat_for(operand: Tensor, tokens: int) -> Callable[[Tensor], Any]:
    """Return the function that gives the loops a product's operands, as flat arrays."""
    return _bits if tokens > 1 and _multiplied_as_bfloat16(operand) else as_array


def _bits(tensor: Tensor) -> Any:
    """Return the bits of a tensor of bfloat16, for which NumPy has no dtype."""
    return tensor.detach().contiguous().view(torch.uint16).numpy().ravel()


def as_array(tensor: Tensor) -> Any:
    """Return the numbers of a tensor as the loops read them: a flat array, float32 or int8."""
    # Calls of torch that change nothing took a tenth of the time of one token's product.
    tensor = tensor if tensor.dtype in (torch.float32, torch.int8) else tensor.float()
    # Not the tensor's reshape(-1), which may return a view with gaps.
    return tensor.numpy(force=True).ravel()


def bias_array(bias: Tensor | None) -> Any:
    """Return a bias as :func:`as_array` does, empty if there is none."""
    return _NO_BIAS if bias is None else as_array(bias)


def _like(result: Tensor, inputs: Tensor) -> Tensor:
    return result if inputs.dtype == torch.float32 else result.to(inputs.dtype)


def _memory(width: int) -> Any:
    """Return memory for packed features, and for a vector for each row of a block."""
    size = (width + ROWS_OF_SUMS) * LANES
    return scratch.take("packed", size, torch.float32, torch.device("cpu")).numpy()


def _packed(width: int, dtype: Any) -> tuple[Any, Any]:
    """Return memory for packed inputs of a dtype, and for sums."""
    memory, size = _memory(width), width * LANES
    return memory[:size].view(dtype), memory[size:]


def _memory_of_transpose(nnz: int, dtype: Any) -> tuple[Any, Any]:
    """Return memory for the offsets and the values of a transpose."""
    size = nnz * dtype.itemsize
    memory = scratch.take("transpose", size + nnz, torch.uint8, torch.device("cpu")).numpy()
    return memory[size:], memory[:size].view(dtype)


def entries_before(layout: Layout, row: int) -> int:
    """Return the number of unpruned entries before a row, the first of a block."""
    return int(layout.starts[row // block_rows(layout.shape)]) if row else 0
