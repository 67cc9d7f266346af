"""Convolves with unpruned values on a CPU, in compiled code that unfolds no image.

An unpruned entry of a filter multiplies one plane of numbers, shifted by the entry's place in the
filter, and adds it to another plane (Park et al., ICLR 2017). A plane is flat and padded, so a
shift is an offset, and each value is multiplied with consecutive numbers. The place of an entry is
where its plane, shifted, begins; ``places`` and ``transposed_places`` compute the places of all
unpruned entries before they are used at many positions.

A sum runs over the unpruned entries in the order of their places, so it does not depend on the
number of threads, and a position's result does not depend on the positions beside it.

The functions take flat arrays and check nothing. A row is an output channel of the weight, or, of
the transposed weight, a plane of the inputs. ``group`` is the number of rows that read the same
inputs, and the distance to the inputs of the next ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_axosparse.sparse.kernels import SEGMENT, Span, Weight
from lightning_axosparse.sparse.kernels.runs import nnz_in, segments_of
from lightning_axosparse.support.vectors import (
    add_dots,
    broadcast,
    compiled,
    item,
    lanes_of,
    load,
    multiply_add,
    store,
    zeros,
)


class Taps(NamedTuple):
    """The unpruned entries of some rows, in flat arrays.

    Attributes:
        places: where the plane of each begins in the source, int32.
        values: their values, float32.
        begins: the first entry of each row, and the number of all, int64.
    """

    places: Any
    values: Any
    begins: Any


@compiled
def places(weight: Weight, columns: Any, group: tuple[int, int], places: Any, begins: Any) -> None:
    """Write the places of all unpruned entries in the inputs."""
    entry = 0
    for row in range(weight.height):
        begins[row] = entry
        first = row // group[0] * group[1]
        for segment in range(segments_of(weight)):
            end = entry + nnz_in(weight, row, segment)
            for k in range(entry, end):
                places[k] = first + item(columns, segment * SEGMENT + item(weight.offsets, k))
            entry = end
    begins[-1] = entry


@compiled
def transposed_places(
    weight: Weight,
    columns: tuple[Any, Any],
    group: tuple[int, int],
    rows: tuple[int, int],
    transposed: Taps,
) -> None:
    """Write the unpruned entries plane after plane of the inputs, and their places in the outputs.

    ``columns`` are the plane of each column of the weight and its shift; ``rows`` are the numbers
    of an output plane, and the place of its first number.
    """
    begins = transposed.begins
    begins[:] = 0
    for write in (False, True):
        entry = 0
        for row in range(weight.height):
            first = row // group[0] * group[1]
            for segment in range(segments_of(weight)):
                end = entry + nnz_in(weight, row, segment)
                for k in range(entry, end):
                    column = segment * SEGMENT + item(weight.offsets, k)
                    plane = first + item(columns[0], column)
                    if write:
                        at, place = begins[plane], row * rows[0] + rows[1]
                        transposed.places[at] = place - item(columns[1], column)
                        transposed.values[at] = item(weight.values, k)
                    begins[plane] += 1
                entry = end
        # Counts become the first entry of each plane; writing has moved it to the next plane's.
        last = np.int64(0)
        for plane in range(len(begins)):
            number = begins[plane]
            begins[plane] = last
            last = number if write else last + number


@compiled
def convolve(
    source: Any, taps: Taps, rows: Span, bias: Any, target: Any, stride: int, positions: int
) -> None:
    """Compute ``positions`` numbers, a multiple of 16, of each row's plane in the target.

    They are the sums of its values times the source; a plane has ``stride`` numbers.
    """
    position = 0
    while position < positions:
        part = (source, taps, rows, bias, target, stride)
        # The last numbers are computed with some of those before them, to the same result.
        if positions >= 64:
            position += _convolve(zeros(64), min(position, positions - 64), *part)
        else:
            position += _convolve(zeros(16), position, *part)


@compiled
def _convolve(
    zero: Any,
    position: int,
    source: Any,
    taps: Taps,
    rows: Span,
    bias: Any,
    target: Any,
    stride: int,
) -> int:
    for row in range(rows[0], rows[1]):
        total = broadcast(zero, bias[row] if len(bias) else 0.0)
        for k in range(item(taps.begins, row), item(taps.begins, row + 1)):
            numbers = load(zero, source, np.intp(item(taps.places, k)) + position)
            total = multiply_add(broadcast(zero, item(taps.values, k)), numbers, total)
        store(total, target, row * stride + position)
    return int(lanes_of(zero))


@compiled
def correlate(
    source: Any, taps: Taps, rows: Span, gradient: tuple[Any, int, int], positions: int
) -> None:
    """Add the products with the gradient to the value of each unpruned entry of some rows.

    ``gradient`` is that of the outputs, the numbers of its planes, and where the first one begins;
    ``positions`` is a multiple of 16.
    """
    position = 0
    while position < positions:
        left = positions - position
        part = (position, source, taps, rows, gradient)
        if left >= 256:
            position += _correlate(zeros(256), *part)
        elif left >= 64:
            position += _correlate(zeros(64), *part)
        else:
            position += _correlate(zeros(16), *part)


@compiled
def _correlate(
    zero: Any, position: int, source: Any, taps: Taps, rows: Span, gradient: tuple[Any, int, int]
) -> int:
    for row in range(rows[0], rows[1]):
        factor = load(zero, gradient[0], row * gradient[1] + gradient[2] + position)
        for k in range(item(taps.begins, row), item(taps.begins, row + 1)):
            place = np.intp(item(taps.places, k)) + position
            add_dots(taps.values, k, factor, source, (place,))
    return int(lanes_of(zero))
