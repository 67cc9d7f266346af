"""Multiplies by unpruned values on a CPU, in compiled code that reads them and their index once.

A product with a weight that is stored in segments (``formats.py``) runs over groups of tokens. The
numbers of one feature, for all tokens of a group, lie side by side and are one vector, so each
value is multiplied with a vector of consecutive numbers, whatever the pattern. 64 rows of the
weight are multiplied with one segment of columns before the next, so that the features of a segment
stay in the first cache. The values of the next 64 rows are prefetched meanwhile.

Sums run over columns in ascending order: a token's result depends neither on the tokens beside it
nor on the number of threads.

A single token has functions of its own, whose time is that of reading the weight. With the
transposed weight the lanes of a vector are values, not tokens. Where the processor has AVX-512, the
inputs of a segment lie in registers, and an instruction permutes them to the order of a row's
values (:func:`by_segments`). Elsewhere they are loaded one by one (:func:`by_columns`). The two add
in different orders. With the weight as it is stored, values are multiplied one by one
(:func:`one_token_spmm`): each changes another output. That gives the bits of :func:`spmm`.

The functions take flat float32 arrays, and check nothing. ``rows`` are those of the weight with
which to compute, ``start`` the number of values before these, ``bias`` has one number for each
output or none, and ``packed`` is memory for ``LANES * (width + ROWS)`` numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_axosparse.sparse.kernels import LANES, ROWS, SEGMENT, Span, Weight
from lightning_axosparse.sparse.kernels.vectors import (
    AT_ONCE,
    HAS_AVX512,
    REGISTER,
    add_dots,
    add_products_from_memory,
    add_products_from_registers,
    broadcast,
    compiled,
    item,
    lanes_of,
    load,
    multiply_add,
    prefetch,
    store,
    store_columns,
    total_of,
    transpose,
    zeros,
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
) -> None:
    """Compute some rows' columns of ``inputs @ weight.t() + bias``."""
    token = 0
    while token < tokens:
        part = (inputs, (token, tokens), weight, rows, start, bias, outputs, packed)
        if tokens - token > 16:
            token += _spmm_t(zeros(64), *part)
        elif tokens - token > 8:
            token += _spmm_t(zeros(16), *part)
        else:
            token += _spmm_t(zeros(8), *part)


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
) -> int:
    lanes, width = lanes_of(zero), weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    sums = packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    _pack(inputs, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        ahead = start = _first_entries(weight, top, number, start, entries)
        for row in range(number):
            store(broadcast(zero, bias[top + row] if len(bias) else 0.0), sums, row * lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                _prefetch_entries(weight, ahead)
                ahead += end - entry
                total = load(zero, sums, row * lanes)
                for k in range(entry, end):
                    feature = load(zero, packed, (features + item(weight.offsets, k)) * lanes)
                    total = multiply_add(broadcast(zero, item(weight.values, k)), feature, total)
                store(total, sums, row * lanes)
        place = token * weight.height + top
        _transpose(sums, 0, lanes, number, group, outputs, place, weight.height)
    return int(group)


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
        ahead = start = _first_entries(weight, top, number, start, entries)
        _pack(inputs, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                _prefetch_entries(weight, ahead)
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
    token = 0
    while token < tokens:
        part = (left, right, (token, tokens), weight, rows, start, packed)
        if tokens - token > 64:
            token += _sddmm(zeros(_LANES_OF_SDDMM), *part)
        elif tokens - token > 16:
            token += _sddmm(zeros(64), *part)
        else:
            token += _sddmm(zeros(16), *part)


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
    products, factors = weight.values, packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    _pack(right, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        start = _first_entries(weight, top, number, start, entries)
        _pack(left, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
                entries[row] = end
                factor = load(zero, factors, row * lanes)
                _add_dots(products, (entry, end), factor, packed, (weight.offsets, features))
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
def _first_entries(weight: Weight, top: int, rows: int, start: int, entries: Any) -> int:
    """Write the first unpruned entry of each of some rows; return the first one after them."""
    for row in range(rows):
        entries[row] = start
        for segment in range(segments_of(weight)):
            start += nnz_in(weight, top + row, segment)
    return start


@compiled
def _prefetch_entries(weight: Weight, entry: int) -> None:
    """Prefetch a row's values of a segment: the processor does not foresee where they are."""
    prefetch(weight.values, entry)
    prefetch(weight.values, entry + 16)
    prefetch(weight.offsets, entry)


@compiled
def _pack(
    source: Any, at: int, stride: int, tokens: int, features: int, packed: Any, lanes: int
) -> None:
    """Write a matrix of tokens x features to ``packed``: the lanes of each feature side by side.

    Lanes without a token become zero.
    """
    _transpose(source, at, stride, tokens, features, packed, 0, lanes)
    for feature in range(features):
        for token in range(tokens, lanes):
            packed[feature * lanes + token] = 0


@compiled
def _transpose(
    source: Any, at: int, stride: int, rows: int, columns: int, target: Any, to: int, step: int
) -> None:
    """Transpose a matrix whose rows are ``stride`` apart to rows that are ``step`` apart."""
    whole_rows, whole_columns = rows // REGISTER * REGISTER, columns // REGISTER * REGISTER
    for row in range(0, whole_rows, REGISTER):
        line, place = at + row * stride, to + row
        for column in range(0, whole_columns, REGISTER):
            transpose(source, line + column, stride, target, place + column * step, step)
        for column in range(whole_columns, columns):
            for lane in range(REGISTER):
                value = item(source, line + lane * stride + column)
                target[place + column * step + lane] = value
    for row in range(whole_rows, rows):
        for column in range(columns):
            target[to + column * step + row] = item(source, at + row * stride + column)


_ROWS_OF_ONE_TOKEN = 16
"""Rows that are multiplied with one segment before the next.

Their values lie one after another, and are in the first cache when the next segment is multiplied.
"""


@compiled
def by_segments(
    inputs: Any, weight: Weight, rows: Span, start: int, bias: Any, outputs: Any
) -> None:
    """Compute some numbers of ``weight @ inputs + bias``, with AVX-512."""
    width, values, offsets = weight.width, weight.values, weight.offsets
    whole = width // SEGMENT
    last = np.zeros(SEGMENT, np.float32)  # with zeros behind the inputs, as a vector is read whole
    for column in range(whole * SEGMENT, width):
        last[column - whole * SEGMENT] = item(inputs, column)
    entries = np.empty(_ROWS_OF_ONE_TOKEN, np.intp)
    sums = np.empty(_ROWS_OF_ONE_TOKEN * 16, np.float32)
    for top in range(rows[0], rows[1], _ROWS_OF_ONE_TOKEN):
        number = min(_ROWS_OF_ONE_TOKEN, rows[1] - top)
        ahead = start = _first_entries(weight, top, number, start, entries)
        for row in range(number):
            store(zeros(16), sums, row * 16)
        for segment in range(segments_of(weight)):
            first = segment * SEGMENT
            if segment < whole:
                features = load(zeros(SEGMENT), inputs, first)
            else:
                features = load(zeros(SEGMENT), last, 0)
            for row in range(number):
                entry = item(entries, row)
                end = entry + nnz_in(weight, top + row, segment)
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
                    _prefetch_entries(weight, ahead)
                    ahead += min(AT_ONCE, end - k)
                    total = add_products_from_registers(
                        total, features, values, offsets, k, end - k
                    )
                    total = add_products_from_registers(
                        total, features, values, offsets, k + 16, end - k - 16
                    )
                store(total, sums, row * 16)
        for row in range(number):
            shift = bias[top + row] if len(bias) else np.float32(0)
            outputs[top + row] = total_of(load(zeros(16), sums, row * 16)) + shift


@compiled
def by_columns(
    inputs: Any, weight: Weight, rows: Span, start: int, bias: Any, outputs: Any
) -> None:
    """Compute the numbers of :func:`by_segments` on other processors."""
    values = weight.values
    columns = np.empty(weight.width + AT_ONCE, np.int32)
    for row in range(rows[0], rows[1]):
        nnz = _columns(weight, row, start, columns)
        lanes, whole = zeros(8), nnz // 8 * 8
        for k in range(0, whole, 8):
            lanes = add_products_from_memory(lanes, values, start + k, inputs, columns, k)
        total = total_of(lanes) + (bias[row] if len(bias) else np.float32(0))
        for k in range(whole, nnz):
            total += item(values, start + k) * item(inputs, np.intp(item(columns, k)))
        outputs[row] = total
        start += nnz


@compiled
def one_token_spmm(inputs: Any, weight: Weight, bias: Any, outputs: Any) -> None:
    """Compute ``inputs @ weight + bias``."""
    one, entry = zeros(1), 0
    for column in range(weight.width):
        outputs[column] = bias[column] if len(bias) else 0
    for row in range(len(inputs)):
        factor = broadcast(one, item(inputs, row))
        for segment in range(segments_of(weight)):
            end = entry + nnz_in(weight, row, segment)
            for k in range(entry, end):
                column = segment * SEGMENT + item(weight.offsets, k)
                total = load(one, outputs, column)
                total = multiply_add(load(one, weight.values, k), factor, total)
                store(total, outputs, column)
            entry = end


@compiled
def _columns(weight: Weight, row: int, start: int, columns: Any) -> int:
    """Write the columns of a row's unpruned entries; return their number.

    Most segments have fewer entries than are written at once. So no branch depends on how many, and
    the next segment's columns are written over those of entries that do not belong to this one.
    """
    nnz, offsets = 0, weight.offsets
    for segment in range(segments_of(weight)):
        number = np.intp(nnz_in(weight, row, segment))
        for k in range(nnz, nnz + number, AT_ONCE):
            if start + k + AT_ONCE <= len(offsets):
                store_columns(offsets, start + k, segment * SEGMENT, columns, k)
            else:
                for last in range(k, nnz + number):
                    columns[last] = segment * SEGMENT + item(offsets, start + last)
        nnz += number
    return nnz


one_token_spmm_t = by_segments if HAS_AVX512 else by_columns
"""Compute some numbers of ``weight @ inputs + bias`` in the way that is fastest here."""
