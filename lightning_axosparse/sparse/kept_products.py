"""Multiplies by the kept values of a sparse weight on a CPU, without a dense one.

The loops are in ``kernels/products.py``, those for one token in ``kernels/one_token.py``.
``benchmarks/overhead/products.py`` measures them against the panels of ``panels.py`` and against a
dense weight.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.formats import SegmentLayout, layout_of
from lightning_axosparse.sparse.kernels import LANES, ROWS, kernel_module
from lightning_axosparse.sparse.layout import Layout, block_rows, row_length
from lightning_axosparse.sparse.materialize import Compute
from lightning_axosparse.sparse.scratch import scratch
from lightning_axosparse.sparse.threads import in_threads
from lightning_axosparse.support import heap_memory

MOST_KEPT = {"times_transposed": 0.5, "times": 0.3, "outer": 0.3}
"""The largest share of kept entries with which a product takes less time here than on panels.

Panels take longer than a dense weight, too, by what it takes to fill them. Other sizes of weights
and numbers of tokens change the ratio of the two ways, but not which one is faster.
"""

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
"""Dtypes whose products run in float32 here, and are rounded.

Only ``compute="sparse"`` asks for that: whether it takes less time than a dense product depends on
the processor, and "auto" chooses the same way on all of them.
"""

_NO_BIAS: Any = np.empty(0, np.float32)

MEASURED = platform.machine().lower() in ("x86_64", "amd64")
"""Whether the loops have been measured on processors like this one; "auto" does without elsewhere.
"""


def runs(compute: Compute, operand: Tensor, layout: Layout) -> bool:
    """Return whether compiled loops may run with these kept values.

    Args:
        compute: as for :func:`lightning_axosparse.sparsify`.
        operand: the kept values or another operand, of the dtype in which the product runs.
        layout: the kept entries.
    """
    if compute == "dense" or (compute == "auto" and not MEASURED):
        return False
    segments = isinstance(layout, SegmentLayout) and layout.has_row_segments
    return segments and operand.is_cpu and operand.dtype == torch.float32


def chosen(
    layout: Layout, product: str, compute: Compute, operand: Tensor
) -> TypeGuard[SegmentLayout]:
    """Return whether a product with a sparse weight is to run here.

    Args:
        layout: the kept entries.
        product: the function's name: "times_transposed", "times" or "outer".
        compute: as for :func:`lightning_axosparse.sparsify`.
        operand: the kept values or another operand, of the dtype in which the product runs.
    """
    if compute == "sparse" and operand.dtype in SIXTEEN_BITS:
        operand = operand.new_empty(0, dtype=torch.float32)
    few = layout.nnz <= MOST_KEPT[product] * layout.shape.numel()
    return runs(compute, operand, layout) and (few or compute == "sparse")


@cache
def load_loops() -> None:
    """Compile the loops, or load them from numba's cache, before a product needs them.

    The first time on a machine that takes some seconds and the memory of a compiler, which a step
    with its activations should not have to find.
    """
    mask = torch.ones(1, 64, dtype=torch.bool, device="cpu")
    layout = layout_of(mask, "segments")
    assert isinstance(layout, SegmentLayout)
    for tokens in (1, 2):
        inputs = torch.zeros(tokens, 64, dtype=torch.float32, device="cpu")
        values = outer(inputs[:, :1], inputs, layout)
        times(times_transposed(inputs, values, layout), values, layout)
        layout.densify(values)  # for products that keep too many entries, on panels


def times_transposed(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the transposed weight.

    Args:
        inputs: shape ``(..., columns)``, float32 or of 16 bits, on CPU.
        values: kept values of the weight, which has the shape ``(rows, columns)``.
        layout: the kept entries.
        bias: shape ``(rows,)``.

    Returns:
        A tensor of shape ``(..., rows)``.
    """
    height, width = layout.shape[0], row_length(layout.shape)
    tokens = inputs.shape[:-1]
    result = heap_memory.empty((*tokens, height))
    number = tokens.numel()
    weight = *_index(layout), _flat(values)
    source, target, shift = _flat(inputs), _flat(result), _bias(bias)

    def part(first: int, last: int) -> None:
        rows, start = (first, last), _entries_before(layout, first)
        shared = (*weight, width, rows, start, shift, target)
        if number == 1:
            kernel_module("one_token").times_transposed(source, *shared)
        else:
            packed = _packed(width)
            kernel_module("products").times_transposed(source, number, *shared, height, packed)

    in_threads(part, height, block_rows(layout.shape), number * layout.nnz)
    return _like(result, inputs)


def times(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the weight.

    Args:
        inputs: shape ``(..., rows)``, float32 or of 16 bits, on CPU.
        values: kept values of the weight, which has the shape ``(rows, columns)``.
        layout: the kept entries.
        bias: shape ``(columns,)``.

    Returns:
        A tensor of shape ``(..., columns)``.
    """
    height, width = layout.shape[0], row_length(layout.shape)
    tokens = inputs.shape[:-1]
    result = heap_memory.empty((*tokens, width))
    number = tokens.numel()
    weight = *_index(layout), _flat(values)
    source, target, shift = _flat(inputs), _flat(result), _bias(bias)

    def part(first: int, last: int) -> None:
        some = (first, last)
        packed = _packed(width)
        kernel_module("products").times(source, some, *weight, height, width, shift, target, packed)

    in_threads(part, number, ROWS, number * layout.nnz)
    return _like(result, inputs)


def outer(left: Tensor, right: Tensor, layout: SegmentLayout) -> Tensor:
    """Return the kept entries of ``left.t() @ right``.

    Args:
        left: shape ``(n, rows)``, float32 or of 16 bits, on CPU.
        right: shape ``(n, columns)``, likewise.
        layout: the kept entries of the result, which has the shape ``(rows, columns)``.

    Returns:
        A tensor of shape ``(layout.nnz,)``.
    """
    tokens, height = left.shape[0], layout.shape[0]
    width = row_length(layout.shape)
    result = heap_memory.zeros((layout.nnz,))
    index, sources, target = _index(layout), (_flat(left), _flat(right)), _flat(result)

    def part(first: int, last: int) -> None:
        rows, start, packed = (first, last), _entries_before(layout, first), _packed(width)
        kernel_module("products").outer(
            *sources, tokens, *index, height, width, rows, start, target, packed
        )

    in_threads(part, height, block_rows(layout.shape), tokens * layout.nnz)
    return _like(result, left)


def _index(layout: SegmentLayout) -> tuple[Any, Any]:
    return layout.counts.numpy(), layout.offsets.numpy()


def _flat(tensor: Tensor) -> Any:
    # Not the tensor's reshape(-1), which may return a view with gaps.
    return _float(tensor).numpy(force=True).ravel()


def _bias(bias: Tensor | None) -> Any:
    return _NO_BIAS if bias is None else _flat(bias)


def _float(tensor: Tensor) -> Tensor:
    # Calls of torch that change nothing took a tenth of the time of one token's product.
    return tensor if tensor.dtype == torch.float32 else tensor.float()


def _like(result: Tensor, inputs: Tensor) -> Tensor:
    return result if inputs.dtype == torch.float32 else result.to(inputs.dtype)


def _packed(width: int) -> Any:
    size = (width + ROWS) * LANES
    return scratch.take("packed", size, torch.float32, torch.device("cpu")).numpy()


def _entries_before(layout: Layout, row: int) -> int:
    return int(layout.starts[row // block_rows(layout.shape)]) if row else 0
