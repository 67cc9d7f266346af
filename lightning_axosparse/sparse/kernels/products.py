"""Multiplies by unpruned values on a CPU, in compiled code that reads them and their index once.

A product with a weight that is stored in segments (``formats.py``) runs over groups of tokens. The
numbers of one feature, for all tokens of a group, lie side by side and are one vector, so each
value is multiplied with a vector of consecutive numbers, whatever the pattern. 64 rows of the
weight are multiplied with one segment of columns before the next, so that the features of a segment
stay in the first cache. The values of the next 64 rows are prefetched meanwhile.

Sums run over columns in ascending order: a token's result depends neither on the tokens beside it
nor on the number of threads.

Where the processor multiplies bfloat16, arrays may be of that dtype, too. An instruction adds the
products of two values to each lane, in float32. ``spmm`` has no such pairs, as each value changes
another sum: with many tokens, the weight is transposed (:func:`transpose_weight`) for ``spmm_t``.

The functions take flat arrays, and check nothing. Arrays of bfloat16 have the dtype uint16; biases,
outputs and the results of ``sddmm`` are float32. ``rows`` are those of the weight with which to
compute, ``start`` the number of values before these, ``bias`` has one number for each output or
none, and ``packed`` is memory for ``LANES * (width + ROWS)`` numbers of float32, but in ``spmm_t``
for ``LANES * width``, with ``LANES * ROWS`` in ``sums``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from lightning_axosparse.sparse.kernels import LANES, ROWS, SEGMENT, Span, Weight
from lightning_axosparse.sparse.kernels.llvm import PAIRS, REGISTER
from lightning_axosparse.sparse.kernels.vectors import (
    add_dots,
    add_two_products,
    broadcast,
    compiled,
    interleave,
    item,
    lanes_of,
    load,
    multiply_add,
    operands_for,
    place_of,
    pointer_to,
    prefetch,
    store,
    transpose,
    zeros,
    zeros_for,
)

_LANES_OF_SDDMM = min(LANES, 8 * REGISTER)
"""Tokens of a vector that fits into eight registers, so that it is read once for many products."""


@compiled
def spmm_t(
    inputs: Any,
    tokens: int,
    weight: Weight,
    rows: Span,
    start: int,
    bias: Any,
    outputs: Any,
    packed: Any,
    sums: Any,
) -> None:
    """Compute some rows' columns of ``inputs @ weight.t() + bias``."""
    many, few = zeros_for(64, inputs), zeros_for(16, inputs)
    token = 0
    while token < tokens:
        part = (inputs, (token, tokens), weight, rows, start, bias, outputs, packed, sums)
        if tokens - token > lanes_of(few):
            token += _spmm_t(many, *part)
        elif tokens - token > 8:
            token += _spmm_t(few, *part)
        else:
            token += _spmm_t(zeros_for(8, inputs), *part)


@compiled
def _spmm_t(
    zero: Any,
    inputs: Any,
    tokens: Span,
    weight: Weight,
    rows: Span,
    start: int,
    bias: Any,
    outputs: Any,
    packed: Any,
    sums: Any,
) -> int:
    lanes, width = lanes_of(zero), weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    values, offsets = pointer_to(weight.values), pointer_to(weight.offsets)
    vectors = pointer_to(packed)
    entries = np.empty(ROWS, np.intp)
    _pack(inputs, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        ahead = start = first_entries(weight, top, number, start, entries)
        for row in range(number):
            store(broadcast(zero, bias[top + row] if len(bias) else 0.0), sums, row * lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                prefetch_entries(weight, ahead)
                ahead += end - entry
                total = load(zero, sums, row * lanes)
                place = vectors, features
                total = _add_products(total, values, offsets, (entry, end), place)
                store(total, sums, row * lanes)
        to = token * weight.height + top
        _transpose(sums, 0, lanes, number, group, outputs, to, weight.height)
    return int(group)


def _add_products(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    """Return ``total`` plus the products of a row's values in a segment with its features.

    Args:
        total: the sums, a vector.
        values: the unpruned values.
        offsets: their offsets in the segment.
        entries: the first of them, and the one after the last.
        features: the packed features, and the segment's first one.
    """
    raise NotImplementedError


@overload(_add_products, strict=False)
def _add_products_of_dtype(total: Any, values: Any, *_: Any) -> Any:
    return _add_float32 if values.dtype == types.float32 else _add_bfloat16


def _add_float32(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    packed, first = features
    for k in range(entries[0], entries[1]):
        feature = load(total, packed, (first + item(offsets, k)) * lanes_of(total))
        total = multiply_add(broadcast(total, item(values, k)), feature, total)
    return total


def _add_bfloat16(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    (packed, first), (k, end) = features, entries
    while k + 2 <= end:
        a = (first + item(offsets, k)) * lanes_of(total)
        b = (first + item(offsets, k + 1)) * lanes_of(total)
        total = add_two_products(total, values, k, packed, (a, b))
        k += 2
    if k < end:
        a = (first + item(offsets, k)) * lanes_of(total)
        total = add_two_products(total, values, k, packed, (a,))
    return total


@compiled
def transpose_weight(weight: Weight, columns: Span, counts: Any, offsets: Any, values: Any) -> None:
    """Write some columns of a weight as rows of its transpose, in the arrays of a ``Weight``.

    Args:
        weight: the weight.
        columns: the first column, a multiple of ``SEGMENT``, and the one after the last.
        counts: the counts of the whole transpose; those of these columns are written.
        offsets: memory for as many offsets as the weight has.
        values: memory for as many values.
    """
    height, segments = weight.height, segments_of(weight)
    pieces = (height + SEGMENT - 1) // SEGMENT
    starts = np.empty(height * segments, np.intp)
    total = 0
    for i in range(height * segments):
        starts[i] = total
        total += item(weight.counts, i)
    places = np.empty(SEGMENT, np.intp)
    total = 0
    for first in range(columns[0], columns[1], SEGMENT):
        segment, last = first // SEGMENT, min(first + SEGMENT, columns[1])
        counts[first * pieces : last * pieces] = 0
        for row in range(height):
            entry = item(starts, row * segments + segment)
            for k in range(entry, entry + nnz_in(weight, row, segment)):
                column = first + np.intp(item(weight.offsets, k))
                counts[column * pieces + row // SEGMENT] += 1
        for column in range(first, last):
            places[column - first] = total
            for i in range(column * pieces, (column + 1) * pieces):
                total += item(counts, i)
        for row in range(height):
            entry = item(starts, row * segments + segment)
            for k in range(entry, entry + nnz_in(weight, row, segment)):
                column = np.intp(item(weight.offsets, k))
                place = item(places, column)
                places[column] = place + 1
                offsets[place], values[place] = row % SEGMENT, item(weight.values, k)


@compiled
def spmm(inputs: Any, tokens: Span, weight: Weight, bias: Any, outputs: Any, packed: Any) -> None:
    """Compute some rows of ``inputs @ weight + bias``."""
    token, end = tokens
    while token < end:
        part = (inputs, (token, end), weight, bias, outputs, packed)
        if end - token > 16:
            token += _spmm(zeros(64), *part)
        elif end - token > 8:
            token += _spmm(zeros(16), *part)
        else:
            token += _spmm(zeros(8), *part)


@compiled
def _spmm(
    zero: Any, inputs: Any, tokens: Span, weight: Weight, bias: Any, outputs: Any, packed: Any
) -> int:
    lanes, height, width = lanes_of(zero), weight.height, weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    factors = packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    for column in range(width):
        store(broadcast(zero, bias[column] if len(bias) else 0.0), packed, column * lanes)
    start = 0
    for top in range(0, height, ROWS):
        number = min(ROWS, height - top)
        ahead = start = first_entries(weight, top, number, start, entries)
        _pack(inputs, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                prefetch_entries(weight, ahead)
                ahead += end - entry
                factor = load(zero, factors, row * lanes)
                for k in range(entry, end):
                    place = (features + item(weight.offsets, k)) * lanes
                    total = load(zero, packed, place)
                    total = multiply_add(broadcast(zero, item(weight.values, k)), factor, total)
                    store(total, packed, place)
    _transpose(packed, 0, lanes, width, group, outputs, token * width, width)
    return int(group)


@compiled
def sddmm(
    left: Any, right: Any, tokens: int, weight: Weight, rows: Span, start: int, packed: Any
) -> None:
    """Add the unpruned entries of some rows of ``left.t() @ right`` to the values of ``weight``."""
    many, few = operands_for(64, left), operands_for(16, left)
    token = 0
    while token < tokens:
        part = (left, right, (token, tokens), weight, rows, start, packed)
        if tokens - token > lanes_of(many):
            token += _sddmm(operands_for(_LANES_OF_SDDMM, left), *part)
        elif tokens - token > lanes_of(few):
            token += _sddmm(many, *part)
        else:
            token += _sddmm(few, *part)


@compiled
def _sddmm(
    zero: Any,
    left: Any,
    right: Any,
    tokens: Span,
    weight: Weight,
    rows: Span,
    start: int,
    packed: Any,
) -> int:
    lanes, height, width = lanes_of(zero), weight.height, weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    factors, offsets = packed[width * lanes :], pointer_to(weight.offsets)
    products, vectors = pointer_to(weight.values), pointer_to(packed)
    entries = np.empty(ROWS, np.intp)
    _pack(right, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        start = first_entries(weight, top, number, start, entries)
        _pack(left, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                factor = load(zero, factors, row * lanes)
                _add_dots(products, (entry, end), factor, vectors, (offsets, features))
    return int(group)


@compiled
def _add_dots(products: Any, entries: Span, factor: Any, packed: Any, offsets: Any) -> None:
    """Add the dot products of a row's vector with the features of some unpruned entries.

    Four at a time share the instructions that add a vector's own numbers. ``offsets`` are the
    array of offsets, and the feature from which they count.
    """
    lanes, (array, first) = lanes_of(factor), offsets
    k, end = entries
    while k + 4 <= end:
        a = (first + item(array, k)) * lanes
        b = (first + item(array, k + 1)) * lanes
        c = (first + item(array, k + 2)) * lanes
        d = (first + item(array, k + 3)) * lanes
        add_dots(products, k, factor, packed, (a, b, c, d))
        k += 4
    while k < end:
        add_dots(products, k, factor, packed, ((first + item(array, k)) * lanes,))
        k += 1


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


def _pack(
    source: Any, at: Any, stride: Any, tokens: Any, features: Any, packed: Any, lanes: Any
) -> None:
    """Write a matrix of tokens x features to ``packed``: the lanes of each feature side by side.

    Lanes without a token become zero.
    """
    raise NotImplementedError


@overload(_pack, strict=False)
def _pack_dtype(source: Any, *_: Any) -> Any:
    return _pack_float32 if source.dtype == types.float32 else _pack_bfloat16


def _pack_float32(
    source: Any, at: Any, stride: Any, tokens: Any, features: Any, packed: Any, lanes: Any
) -> None:
    _transpose(source, at, stride, tokens, features, packed, 0, lanes)
    for feature in range(features):
        for token in range(tokens, lanes):
            packed[feature * lanes + token] = 0


def _pack_bfloat16(
    source: Any, at: Any, stride: Any, tokens: Any, features: Any, packed: Any, lanes: Any
) -> None:
    for token in range(0, lanes, PAIRS):
        block, line, step = source, at + token * stride, stride
        if token + PAIRS > tokens:
            block, line, step = np.zeros(PAIRS * features, np.uint16), 0, features
            for i in range(token, tokens):
                for feature in range(features):
                    place = (i - token) * features + feature
                    block[place] = item(source, at + i * stride + feature)
        whole = features // PAIRS * PAIRS
        for feature in range(0, whole, PAIRS):
            interleave(block, line + feature, step, packed, feature * lanes + token, lanes)
        for feature in range(whole, features):
            for row in range(PAIRS):
                place = feature * lanes + token + place_of(row)
                packed[place] = item(block, line + row * step + feature)


@compiled
def _transpose(
    source: Any, at: int, stride: int, rows: int, columns: int, target: Any, to: int, step: int
) -> None:
    """Transpose a matrix whose rows are ``stride`` apart to rows that are ``step`` apart.

    Of the two, the one whose rows are further apart is walked row by row: at a distance of 4096
    bytes, they fall into the same few lines of the first cache.
    """
    whole_rows, whole_columns = rows // REGISTER * REGISTER, columns // REGISTER * REGISTER
    swap = step > stride
    outer, inner = (whole_columns, whole_rows) if swap else (whole_rows, whole_columns)
    for first in range(0, outer, REGISTER):
        for second in range(0, inner, REGISTER):
            row, column = (second, first) if swap else (first, second)
            place = to + row + column * step
            transpose(source, at + row * stride + column, stride, target, place, step)
    for row in range(rows):
        for column in range(whole_columns if row < whole_rows else 0, columns):
            target[to + column * step + row] = item(source, at + row * stride + column)
