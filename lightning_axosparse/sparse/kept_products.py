"""Multiplies by the kept values of a sparse weight on a CPU, without a dense one.

The loops are in ``kernels/products.py``. ``benchmarks/overhead/products.py`` measures them against
the panels of ``panels.py`` and against a dense weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_axosparse.sparse.formats import SegmentLayout
from lightning_axosparse.sparse.kernels import LANES, ROWS, kernel_module
from lightning_axosparse.sparse.layout import Layout, block_rows, row_length
from lightning_axosparse.sparse.materialize import Compute
from lightning_axosparse.sparse.scratch import scratch

MOST_KEPT = {"times_transposed": 0.5, "times": 0.3, "outer": 0.3}
"""The largest share of kept entries with which a product takes less time here than on panels.

Panels take longer than a dense weight, too, by what it takes to fill them. Other sizes of weights
and numbers of tokens change the ratio of the two ways, but not which one is faster.
"""

_WORK_OF_A_THREAD = 2**20
"""Fewer multiplications are not worth another thread."""


def chosen(
    product: str, compute: Compute, operand: Tensor, layout: Layout
) -> TypeGuard[SegmentLayout]:
    """Return whether a product with a sparse weight is to run here.

    Args:
        product: the function's name: "times_transposed", "times" or "outer".
        compute: as for :func:`lightning_axosparse.sparsify`.
        operand: the kept values or another operand, of the dtype in which the product runs.
        layout: the kept entries.
    """
    if compute == "dense" or not isinstance(layout, SegmentLayout) or not layout.has_row_segments:
        return False
    if not operand.is_cpu or operand.dtype != torch.float32:
        return False
    return compute == "sparse" or layout.nnz <= MOST_KEPT[product] * layout.shape.numel()


def times_transposed(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the transposed weight.

    Args:
        inputs: shape ``(n, columns)``, float32, on CPU.
        values: kept values of the weight, which has the shape ``(rows, columns)``.
        layout: the kept entries.
        bias: shape ``(rows,)``.

    Returns:
        A tensor of shape ``(n, rows)``.
    """
    tokens, height = inputs.shape[0], layout.shape[0]
    width = row_length(layout.shape)
    result = inputs.new_empty(tokens, height)
    weight = *_index(layout), _flat(values)
    source, target, shift = _flat(inputs), _flat(result), _flat(_bias(bias, inputs))

    def part(first: int, last: int) -> None:
        rows, start = (first, last), _entries_before(layout, first)
        shared = (source, tokens, *weight, width, rows, start, shift, target, height)
        if tokens == 1:
            kernel_module("products").one_times_transposed(*shared)
        else:
            kernel_module("products").times_transposed(*shared, _packed(width))

    _in_threads(part, height, block_rows(layout.shape), tokens * layout.nnz)
    return result


def times(
    inputs: Tensor, values: Tensor, layout: SegmentLayout, bias: Tensor | None = None
) -> Tensor:
    """Multiply ``inputs`` by the weight.

    Args:
        inputs: shape ``(n, rows)``, float32, on CPU.
        values: kept values of the weight, which has the shape ``(rows, columns)``.
        layout: the kept entries.
        bias: shape ``(columns,)``.

    Returns:
        A tensor of shape ``(n, columns)``.
    """
    height, width = layout.shape[0], row_length(layout.shape)
    result = inputs.new_empty(inputs.shape[0], width)
    weight = *_index(layout), _flat(values)
    source, target, shift = _flat(inputs), _flat(result), _flat(_bias(bias, inputs))

    def part(first: int, last: int) -> None:
        tokens = (first, last)
        packed = _packed(width)
        kernel_module("products").times(
            source, tokens, *weight, height, width, shift, target, packed
        )

    _in_threads(part, inputs.shape[0], ROWS, inputs.shape[0] * layout.nnz)
    return result


def outer(left: Tensor, right: Tensor, layout: SegmentLayout) -> Tensor:
    """Return the kept entries of ``left.t() @ right``.

    Args:
        left: shape ``(n, rows)``, float32, on CPU.
        right: shape ``(n, columns)``, likewise.
        layout: the kept entries of the result, which has the shape ``(rows, columns)``.

    Returns:
        A tensor of shape ``(layout.nnz,)``.
    """
    tokens, height = left.shape[0], layout.shape[0]
    width = row_length(layout.shape)
    result = left.new_zeros(layout.nnz)
    index, sources, target = _index(layout), (_flat(left), _flat(right)), _flat(result)

    def part(first: int, last: int) -> None:
        rows, start, packed = (first, last), _entries_before(layout, first), _packed(width)
        kernel_module("products").outer(
            *sources, tokens, *index, height, width, rows, start, target, packed
        )

    _in_threads(part, height, block_rows(layout.shape), tokens * layout.nnz)
    return result


def _index(layout: SegmentLayout) -> tuple[Any, Any]:
    return layout.counts.numpy(), layout.offsets.numpy()


def _flat(tensor: Tensor) -> Any:
    # Not reshape(-1), which may return a view with gaps.
    return tensor.detach().contiguous().view(-1).numpy()


def _bias(bias: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if bias is None else bias


def _packed(width: int) -> Any:
    size = (width + ROWS) * LANES
    return scratch.take("packed", size, torch.float32, torch.device("cpu")).numpy()


def _entries_before(layout: Layout, row: int) -> int:
    return int(layout.starts[row // block_rows(layout.shape)]) if row else 0


def _in_threads(part: Callable[[int, int], None], size: int, multiple: int, work: int) -> None:
    """Run ``part`` on ranges that make up ``range(size)``, in as many threads as torch has."""
    threads = min(torch.get_num_threads(), work // _WORK_OF_A_THREAD, -(-size // multiple))
    if threads < 2:
        part(0, size)
        return
    edges = _edges(size, multiple, threads)
    others = [_threads().submit(part, *edge) for edge in pairwise(edges[1:])]
    part(*edges[:2])
    for other in others:
        other.result()


def _edges(size: int, multiple: int, parts: int) -> Sequence[int]:
    pieces = -(-size // multiple)
    return [min(pieces * part // parts * multiple, size) for part in range(parts + 1)]


@cache  # One pool for the process, as torch has one.
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="axosparse-product")


# A forked process has the pool's threads no more.
os.register_at_fork(after_in_child=_threads.cache_clear)
