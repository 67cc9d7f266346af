"""Densifies and compresses a tile on a CPU, in compiled code that reads its segments once."""

from __future__ import annotations

from typing import Any

import torch
from numba import njit
from torch import Tensor

from lightning_axosparse.sparse.kernels import SEGMENT, Blocks, Segments
from lightning_axosparse.sparse.kernels.vectors import item

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Entries are moved as integers of their size: NumPy has no bfloat16."""

_compiled = njit(nogil=True, cache=True, error_model="numpy")


def densify(index: Segments, blocks: Blocks, values: Tensor, out: Tensor) -> None:
    """Fill the flat tile ``out`` with ``values`` where an entry is kept and zeros elsewhere."""
    out.zero_()
    _scatter(*_arrays(index), index.line, _numpy(values), _numpy(out))


def compress(index: Segments, blocks: Blocks, dense: Tensor, out: Tensor) -> None:
    """Copy the kept entries of the flat tile ``dense`` to ``out``."""
    _gather(*_arrays(index), index.line, _numpy(dense), _numpy(out))


def _arrays(index: Segments) -> tuple[Any, Any]:
    return index.counts.numpy(), index.offsets.numpy()


def _numpy(tensor: Tensor) -> Any:
    return tensor.detach().view(_BITS[tensor.dtype.itemsize]).numpy()


@_compiled  # type: ignore[untyped-decorator]
def _scatter(counts: Any, offsets: Any, line: int, values: Any, dense: Any) -> None:
    entry = 0
    segments = (line + SEGMENT - 1) // SEGMENT
    for segment in range(len(counts)):
        begin = segment // segments * line + segment % segments * SEGMENT
        end = entry + counts[segment]
        for k in range(entry, end):
            dense[begin + item(offsets, k)] = item(values, k)
        entry = end


@_compiled  # type: ignore[untyped-decorator]
def _gather(counts: Any, offsets: Any, line: int, dense: Any, values: Any) -> None:
    entry = 0
    segments = (line + SEGMENT - 1) // SEGMENT
    for segment in range(len(counts)):
        begin = segment // segments * line + segment % segments * SEGMENT
        end = entry + counts[segment]
        for k in range(entry, end):
            values[k] = item(dense, begin + item(offsets, k))
        entry = end
