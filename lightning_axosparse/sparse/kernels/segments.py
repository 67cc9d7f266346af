"""Densifies and compresses tiles and single rows on a CPU, in compiled code that reads segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.kernels import SEGMENT
from lightning_axosparse.support.vectors import compiled, item

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Entries are moved as integers of their size: NumPy has no bfloat16."""


Rows = tuple[Tensor, Tensor, Tensor, int, int]
"""The layout of a matrix of which each row has segments of its own.

Unpruned entries in each segment, row after row; the offset of each in its segment; unpruned
entries before each block; rows of a block; columns of the matrix.
"""


def densify(counts: Tensor, offsets: Tensor, line: int, values: Tensor, out: Tensor) -> None:
    """Fill the flat tile ``out`` with ``values`` at the unpruned entries, and zeros.

    Args:
        counts: unpruned entries in each segment, int16.
        offsets: the offset of each unpruned entry in its segment, uint8.
        line: entries of a line, which is cut into segments.
        values: the unpruned values, of any dtype.
        out: the tile, of any dtype.
    """
    out.zero_()
    cast = _numpy(values.to(out.dtype))
    _scatter(counts.numpy(), offsets.numpy(), line, cast, _numpy(out))


def compress(counts: Tensor, offsets: Tensor, line: int, dense: Tensor, out: Tensor) -> None:
    """Copy the unpruned entries of the flat tile ``dense`` to ``out``; arguments as above."""
    read = out if out.dtype == dense.dtype else dense.new_empty(len(out))
    _gather(counts.numpy(), offsets.numpy(), line, _numpy(dense), _numpy(read))
    if read is not out:
        out.copy_(read)


def take_rows(numbers: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Return some dense rows of a matrix.

    Args:
        numbers: which rows, shape ``(n,)``, integers.
        values: the unpruned values of the matrix.
        rows: its layout.

    Returns:
        A tensor of shape ``(n, columns)``.
    """
    result = values.new_zeros(len(numbers), rows[-1])
    entries = _numpy(values.contiguous())
    _take_rows(numbers.numpy(), _row_arrays(rows), entries, _numpy(result).reshape(-1))
    return result


def add_rows(numbers: Tensor, dense: Tensor, rows: Rows, padding: int | None = None) -> Tensor:
    """Add dense rows to some rows of a zero matrix, and return the unpruned entries of the sums.

    Args:
        numbers: which rows to add to, shape ``(n,)``, integers.
        dense: the rows, shape ``(n, columns)``, floating.
        rows: the layout of the matrix.
        padding: a row to which nothing is added.
    """
    if padding is not None:
        dense, numbers = dense[numbers != padding], numbers[numbers != padding]
    wide = dense if dense.dtype.itemsize >= 4 else dense.float()
    values = wide.new_zeros(len(rows[1]))
    flat = wide.detach().contiguous().view(-1).numpy()
    _add_rows(numbers.numpy(), _row_arrays(rows), flat, values.numpy())
    return values.to(dense.dtype)


def _row_arrays(rows: Rows) -> tuple[Any, Any, Any, int, int]:
    counts, offsets, starts, in_block, width = rows
    return counts.numpy(), offsets.numpy(), starts.numpy(), in_block, width


def _numpy(tensor: Tensor) -> Any:
    """Return a contiguous tensor as an array: the loops know no strides."""
    assert tensor.is_contiguous()
    return tensor.detach().view(_BITS[tensor.dtype.itemsize]).numpy()


@compiled
def _scatter(counts: Any, offsets: Any, line: int, values: Any, dense: Any) -> None:
    entry = 0
    segments = (line + SEGMENT - 1) // SEGMENT
    for segment in range(len(counts)):
        begin = segment // segments * line + segment % segments * SEGMENT
        end = entry + counts[segment]
        for k in range(entry, end):
            dense[begin + item(offsets, k)] = item(values, k)
        entry = end


@compiled
def _gather(counts: Any, offsets: Any, line: int, dense: Any, values: Any) -> None:
    entry = 0
    segments = (line + SEGMENT - 1) // SEGMENT
    for segment in range(len(counts)):
        begin = segment // segments * line + segment % segments * SEGMENT
        end = entry + counts[segment]
        for k in range(entry, end):
            values[k] = item(dense, begin + item(offsets, k))
        entry = end


@compiled
def _take_rows(numbers: Any, rows: Any, values: Any, dense: Any) -> None:
    counts, offsets, _, _, width = rows
    segments = (width + SEGMENT - 1) // SEGMENT
    for place in range(len(numbers)):
        entry, first = _first_entry(numbers[place], rows), numbers[place] * segments
        of_row = counts[first : first + segments]
        _scatter(of_row, offsets[entry:], width, values[entry:], dense[place * width :])


@compiled
def _add_rows(numbers: Any, rows: Any, dense: Any, values: Any) -> None:
    counts, offsets, _, _, width = rows
    segments = (width + SEGMENT - 1) // SEGMENT
    for place in range(len(numbers)):
        row = numbers[place]
        entry = _first_entry(row, rows)
        for segment in range(segments):
            begin = place * width + segment * SEGMENT
            end = entry + counts[row * segments + segment]
            for k in range(entry, end):
                values[k] += item(dense, begin + item(offsets, k))
            entry = end


@compiled
def _first_entry(row: int, rows: Any) -> Any:
    counts, _, starts, in_block, width = rows
    segments = (width + SEGMENT - 1) // SEGMENT
    entry = np.int64(starts[row // in_block])
    for segment in range(row // in_block * in_block * segments, row * segments):
        entry += counts[segment]
    return entry
