"""Lists the runs of a sparse weight, in the order in which ``products.py`` multiplies them.

A run is the unpruned entries of a row in a segment of columns. The rows of a block are multiplied
with one segment before the next, so the runs of a block and a segment follow each other. The
functions here write them as flat arrays of integers, which :func:`read_run` reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_axosparse.sparse.kernels import ROWS_OF_SUMS, SEGMENT, Span, Weight
from lightning_axosparse.support.vectors import compiled, item, prefetch

_AHEAD = 32
"""A run is prefetched by so many before it is read; arrays have as many zeros at their end."""

_ROW_BITS = 7
_NNZ_BITS = 10


@compiled
def runs_of(weight: Weight, rows: Span, start: int, block: int) -> Any:
    """Return the runs of some rows, in the order of the rows.

    Args:
        weight: the weight.
        rows: the rows.
        start: the number of values before these.
        block: the rows of a block, at most ``ROWS_OF_SUMS``.
    """
    segments = segments_of(weight)
    runs = np.zeros((rows[1] - rows[0]) * segments + _AHEAD, np.int64)
    entry, place = start, 0
    for top in range(rows[0], rows[1], block):
        number = min(block, rows[1] - top)
        for row in range(number):
            for segment in range(segments):
                nnz = nnz_in(weight, top + row, segment)
                runs[place + segment * number + row] = _run(row, entry, nnz)
                entry += nnz
        place += segments * number
    return runs


@compiled
def sort_runs(runs: Any, weight: Weight, rows: Span, block: int) -> None:
    """Sort the runs of each block and segment by their numbers of entries.

    So the processor foresees where the loop over the entries of a run ends.
    """
    memory = np.empty(SEGMENT + 2 + block, np.int64)
    place = 0
    for top in range(rows[0], rows[1], block):
        number = min(block, rows[1] - top)
        for _ in range(segments_of(weight)):
            _sort(runs, (place, place + number), memory)
            place += number


@compiled
def transpose_weight(weight: Weight, columns: Span, offsets: Any, values: Any) -> Any:
    """Write the entries of some columns as those of a transpose; return its sorted runs.

    They are written run by run, so that products with blocks of ``ROWS_OF_SUMS`` of the columns
    read one part of the arrays.

    Args:
        weight: the weight.
        columns: the first column, a multiple of ``ROWS_OF_SUMS``, and the one after the last.
        offsets: memory for as many offsets as the weight has.
        values: memory for as many values.
    """
    pieces = (weight.height + SEGMENT - 1) // SEGMENT
    runs = np.zeros((columns[1] - columns[0]) * pieces + _AHEAD, np.int64)
    starts = _first_entries(weight)
    begins, ends, numbers = np.empty((3, SEGMENT), np.intp)
    memory = np.empty(SEGMENT + 2 + ROWS_OF_SUMS, np.int64)
    total, first = 0, columns[0]
    while first < columns[1]:
        last = min(first // SEGMENT * SEGMENT + SEGMENT, columns[1])
        for piece in range(pieces):
            top, rows = piece * SEGMENT, min(SEGMENT, weight.height - piece * SEGMENT)
            _entries_between(weight, starts, (top, rows), (first, last), begins, ends)
            numbers[:] = 0
            for row in range(rows):
                prefetch_entries(weight, item(begins, row))  # the values are read at last
                for k in range(item(begins, row), item(ends, row)):
                    numbers[np.intp(item(weight.offsets, k))] += 1
            for column in range(first, last, ROWS_OF_SUMS):
                number = min(ROWS_OF_SUMS, last - column)
                place = (column - columns[0]) * pieces + piece * number
                for row in range(number):
                    # Numbers of entries become the places of the next ones.
                    offset = (column + row) % SEGMENT
                    nnz = numbers[offset]
                    runs[place + row], numbers[offset] = _run(row, total, nnz), total
                    total += nnz
                _sort(runs, (place, place + number), memory)
            for row in range(rows):
                for k in range(item(begins, row), item(ends, row)):
                    offset = np.intp(item(weight.offsets, k))
                    place = item(numbers, offset)
                    numbers[offset] = place + 1
                    offsets[place], values[place] = row, item(weight.values, k)
        first = last
    return runs


@compiled
def _first_entries(weight: Weight) -> Any:
    """Return the first unpruned entry of each row in each segment, row after row."""
    firsts = np.empty(weight.height * segments_of(weight), np.intp)
    total = 0
    for place in range(len(firsts)):
        firsts[place] = total
        total += item(weight.counts, place)
    return firsts


@compiled
def _entries_between(
    weight: Weight, firsts: Any, rows: Span, columns: Span, begins: Any, ends: Any
) -> None:
    """Write the first entry of some rows between columns of a segment, and the one after the last.

    ``rows`` are the first row and their number.
    """
    segment = columns[0] // SEGMENT
    low, high = columns[0] - segment * SEGMENT, columns[1] - segment * SEGMENT
    for row in range(rows[1]):
        place = (rows[0] + row) * segments_of(weight) + segment
        if row + 16 < rows[1]:
            prefetch(weight.offsets, item(firsts, place + 16 * segments_of(weight)))
        begin = item(firsts, place)
        end = begin + item(weight.counts, place)
        while begin < end and item(weight.offsets, begin) < low:
            begin += 1
        while begin < end and item(weight.offsets, end - 1) >= high:
            end -= 1
        begins[row], ends[row] = begin, end


@compiled
def _sort(runs: Any, places: Span, memory: Any) -> None:
    """Sort the runs at some places.

    ``memory`` is for ``SEGMENT + 2`` integers, and as many as there are runs.
    """
    before, unsorted = memory[: SEGMENT + 2], memory[SEGMENT + 2 :]
    fewest, most = SEGMENT, 0
    for i in range(places[1] - places[0]):
        run = item(runs, places[0] + i)
        unsorted[i] = run
        fewest, most = min(fewest, _nnz(run)), max(most, _nnz(run))
    before[fewest : most + 2] = 0
    for i in range(places[1] - places[0]):
        before[_nnz(item(unsorted, i)) + 1] += 1
    before[fewest] = places[0]
    for nnz in range(fewest, most):
        before[nnz + 1] += before[nnz]
    for i in range(places[1] - places[0]):
        run = item(unsorted, i)
        place = item(before, _nnz(run))
        before[_nnz(run)] = place + 1
        runs[place] = run


@compiled
def _nnz(run: int) -> int:
    """Return how many entries a run has."""
    return run >> _ROW_BITS & (1 << _NNZ_BITS) - 1


@compiled
def _run(row: int, entry: int, nnz: int) -> int:
    """Return a run: its row in the block, its first entry, and the number of its entries."""
    return (entry << _NNZ_BITS | nnz) << _ROW_BITS | row


@compiled
def read_run(runs: Any, place: int) -> tuple[int, Span]:
    """Return the row of a run in its block, its first entry, and the one after its last."""
    run = item(runs, place)
    entry = run >> _NNZ_BITS + _ROW_BITS
    return run & (1 << _ROW_BITS) - 1, (entry, entry + _nnz(run))


@compiled
def prefetch_run(weight: Weight, runs: Any, place: int) -> None:
    """Prefetch a run that is read soon: the processor does not foresee where it is."""
    prefetch_entries(weight, item(runs, place + _AHEAD) >> _NNZ_BITS + _ROW_BITS)


@compiled
def segments_of(weight: Weight) -> int:
    """Return the number of segments of a row."""
    return (weight.width + SEGMENT - 1) // SEGMENT


@compiled
def nnz_in(weight: Weight, row: int, segment: int) -> int:
    """Return the number of unpruned entries in a segment of a row."""
    nnz: int = item(weight.counts, row * segments_of(weight) + segment)
    return nnz


@compiled
def first_entries(weight: Weight, top: int, rows: int, start: int, entries: Any) -> int:
    """Write the first unpruned entry of each of some rows; return the first one after them."""
    for row in range(rows):
        entries[row] = start
        for segment in range(segments_of(weight)):
            start += nnz_in(weight, top + row, segment)
    return start


@compiled
def prefetch_entries(weight: Weight, entry: int) -> None:
    """Prefetch a row's values of a segment: the processor does not foresee where they are."""
    prefetch(weight.values, entry)
    prefetch(weight.values, entry + 16)
    prefetch(weight.offsets, entry)
