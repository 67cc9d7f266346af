"""Multiplies a single token by kept values on a CPU, which takes as long as they are read.

With the transposed weight the lanes of a vector are kept entries, not tokens as in ``products.py``.
Where the processor has AVX-512, the numbers of a segment of the token lie in registers, and those
that a row's kept values multiply are found there (:func:`by_segments`). Elsewhere they are loaded
one by one (:func:`by_columns`). The two add in different orders.

With the weight as it is stored, kept values are multiplied one by one (:func:`times`): each changes
another output. That gives the bits of ``products.py``.

The functions take what those of ``products.py`` do, for one token, and check nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_axosparse.sparse.kernels import SEGMENT
from lightning_axosparse.sparse.kernels.vectors import (
    AT_ONCE,
    FINDS,
    add_found_products,
    add_sparse_products,
    broadcast,
    compiled,
    item,
    load,
    multiply_add,
    prefetch,
    store,
    store_columns,
    total_of,
    zeros,
)

_ROWS = 16
"""Rows that are multiplied with one segment before the next.

Their kept entries lie one after another, and are in the first cache when the next segment is
multiplied.
"""


@compiled
def by_segments(
    inputs: Any,
    counts: Any,
    offsets: Any,
    values: Any,
    width: int,
    rows: tuple[int, int],
    start: int,
    bias: Any,
    outputs: Any,
) -> None:
    """Compute some numbers of ``weight @ inputs + bias``, with AVX-512.

    The kept entries of the next rows are asked for in time: the processor does not foresee where
    they are, as each segment's are read in turn.
    """
    segments = (width + SEGMENT - 1) // SEGMENT
    whole = width // SEGMENT
    last = np.zeros(SEGMENT, np.float32)  # with zeros behind the inputs, as a vector is read whole
    for column in range(whole * SEGMENT, width):
        last[column - whole * SEGMENT] = item(inputs, column)
    entries = np.empty(_ROWS, np.intp)
    sums = np.empty(_ROWS * 16, np.float32)
    for top in range(rows[0], rows[1], _ROWS):
        number = min(_ROWS, rows[1] - top)
        for row in range(number):
            entries[row] = start
            for segment in range(segments):
                start += item(counts, (top + row) * segments + segment)
            store(zeros(16), sums, row * 16)
        ahead = start
        for segment in range(segments):
            first = segment * SEGMENT
            if segment < whole:
                features = load(zeros(SEGMENT), inputs, first)
            else:
                features = load(zeros(SEGMENT), last, 0)
            for row in range(number):
                entry = item(entries, row)
                end = entry + item(counts, (top + row) * segments + segment)
                entries[row] = end
                if end + AT_ONCE > len(values):
                    for k in range(entry, end):
                        factor = item(inputs, first + item(offsets, k))
                        sums[row * 16] += item(values, k) * factor
                    continue
                total = load(zeros(16), sums, row * 16)
                # Always two vectors: where a second one followed if there were more than 16
                # entries, the processor guessed wrong whether it would, which took longer.
                for k in range(entry, end, AT_ONCE):
                    prefetch(values, ahead)
                    prefetch(values, ahead + 16)
                    prefetch(offsets, ahead)
                    ahead += min(AT_ONCE, end - k)
                    total = add_found_products(total, features, values, offsets, k, end - k)
                    total = add_found_products(
                        total, features, values, offsets, k + 16, end - k - 16
                    )
                store(total, sums, row * 16)
        for row in range(number):
            shift = bias[top + row] if len(bias) else np.float32(0)
            outputs[top + row] = total_of(load(zeros(16), sums, row * 16)) + shift


@compiled
def by_columns(
    inputs: Any,
    counts: Any,
    offsets: Any,
    values: Any,
    width: int,
    rows: tuple[int, int],
    start: int,
    bias: Any,
    outputs: Any,
) -> None:
    """Compute what :func:`by_segments` does, on other processors."""
    segments = (width + SEGMENT - 1) // SEGMENT
    columns = np.empty(width + AT_ONCE, np.int32)
    for row in range(rows[0], rows[1]):
        kept = _columns(counts, row * segments, segments, offsets, start, columns)
        lanes, whole = zeros(8), kept // 8 * 8
        for k in range(0, whole, 8):
            lanes = add_sparse_products(lanes, values, start + k, inputs, columns, k)
        total = total_of(lanes) + (bias[row] if len(bias) else np.float32(0))
        for k in range(whole, kept):
            total += item(values, start + k) * item(inputs, np.intp(item(columns, k)))
        outputs[row] = total
        start += kept


@compiled
def spmm(
    inputs: Any, counts: Any, offsets: Any, values: Any, width: int, bias: Any, outputs: Any
) -> None:
    """Compute ``inputs @ weight + bias``."""
    segments = (width + SEGMENT - 1) // SEGMENT
    columns = np.empty(width + AT_ONCE, np.int32)
    for column in range(width):
        outputs[column] = bias[column] if len(bias) else 0
    start = 0
    for row in range(len(inputs)):
        factor = broadcast(zeros(1), item(inputs, row))
        kept = _columns(counts, row * segments, segments, offsets, start, columns)
        for k in range(kept):
            column = np.intp(item(columns, k))
            total = load(zeros(1), outputs, column)
            store(multiply_add(load(zeros(1), values, start + k), factor, total), outputs, column)
        start += kept


@compiled
def _columns(counts: Any, first: int, segments: int, offsets: Any, start: int, columns: Any) -> int:
    """Write the columns of a row's kept entries; return their number.

    Most segments have fewer entries than are written at once. So no branch depends on how many, and
    the next segment's columns are written over those of entries that do not belong to this one.
    """
    kept = 0
    for segment in range(segments):
        number = np.intp(item(counts, first + segment))
        for k in range(kept, kept + number, AT_ONCE):
            if start + k + AT_ONCE <= len(offsets):
                store_columns(offsets, start + k, segment * SEGMENT, columns, k)
            else:
                for last in range(k, kept + number):
                    columns[last] = segment * SEGMENT + item(offsets, start + last)
        kept += number
    return kept


spmm_t = by_segments if FINDS else by_columns
"""Compute some numbers of ``weight @ inputs + bias`` as this processor does it best."""
