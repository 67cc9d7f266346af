"""Multiplies by kept values on a CPU, in compiled code that reads them and their index once.

A product with a weight that is stored in segments (``formats.py``) runs over groups of tokens. The
numbers of one feature, for all tokens of a group, lie side by side and are one vector, so each kept
value is multiplied with a vector of consecutive numbers, whatever the pattern. 64 rows of the
weight are multiplied with one segment of columns before the next, so that the features of a segment
stay in the first cache.

Sums run over columns in ascending order: a token's result depends neither on the tokens beside it
nor on the number of threads. Only a single token is multiplied in another order, by
``one_token.py``.

The functions take flat float32 arrays and their sizes, and check nothing. A weight has ``height`` x
``width`` numbers; ``counts`` has the kept entries in each segment, row after row, and ``offsets``
the place of each in its segment. ``rows`` are the first row of it to compute with and the one after
the last, ``start`` the kept entries before these, ``bias`` one number for each output or none, and
``packed`` memory for ``LANES * (width + ROWS)`` numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_axosparse.sparse.kernels import LANES, ROWS, SEGMENT
from lightning_axosparse.sparse.kernels.vectors import (
    broadcast,
    compiled,
    dot,
    item,
    lanes_of,
    load,
    multiply_add,
    store,
    transpose,
    zeros,
)


@compiled
def spmm_t(
    inputs: Any,
    tokens: int,
    counts: Any,
    offsets: Any,
    values: Any,
    width: int,
    rows: tuple[int, int],
    start: int,
    bias: Any,
    outputs: Any,
    height: int,
    packed: Any,
) -> None:
    """Compute some rows' columns of ``inputs @ weight.t() + bias``."""
    token = 0
    while token < tokens:
        part = (inputs, token, tokens, counts, offsets, values, width, rows, start, bias, outputs)
        if tokens - token > 16:
            token += _times_transposed(zeros(64), *part, height, packed)
        else:
            token += _times_transposed(zeros(16), *part, height, packed)


@compiled
def _times_transposed(
    zero: Any,
    inputs: Any,
    token: int,
    tokens: int,
    counts: Any,
    offsets: Any,
    values: Any,
    width: int,
    rows: tuple[int, int],
    start: int,
    bias: Any,
    outputs: Any,
    height: int,
    packed: Any,
) -> int:
    lanes = lanes_of(zero)
    group = min(lanes, tokens - token)
    segments = (width + SEGMENT - 1) // SEGMENT
    sums = packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    _pack(inputs, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        start = _begin(counts, top, number, segments, start, entries)
        for row in range(number):
            store(broadcast(zero, bias[top + row] if len(bias) else 0.0), sums, row * lanes)
        for segment in range(segments):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + item(counts, (top + row) * segments + segment)
                entries[row] = end
                total = load(zero, sums, row * lanes)
                for k in range(entry, end):
                    feature = load(zero, packed, (features + item(offsets, k)) * lanes)
                    total = multiply_add(broadcast(zero, item(values, k)), feature, total)
                store(total, sums, row * lanes)
        _unpack(sums, lanes, outputs, token * height + top, height, group, number)
    return int(group)


@compiled
def spmm(
    inputs: Any,
    tokens: tuple[int, int],
    counts: Any,
    offsets: Any,
    values: Any,
    height: int,
    width: int,
    bias: Any,
    outputs: Any,
    packed: Any,
) -> None:
    """Compute some rows of ``inputs @ weight + bias``."""
    token = tokens[0]
    while token < tokens[1]:
        part = (inputs, token, tokens[1], counts, offsets, values, height, width, bias, outputs)
        if tokens[1] - token > 16:
            token += _times(zeros(64), *part, packed)
        else:
            token += _times(zeros(16), *part, packed)


@compiled
def _times(
    zero: Any,
    inputs: Any,
    token: int,
    tokens: int,
    counts: Any,
    offsets: Any,
    values: Any,
    height: int,
    width: int,
    bias: Any,
    outputs: Any,
    packed: Any,
) -> int:
    lanes = lanes_of(zero)
    group = min(lanes, tokens - token)
    segments = (width + SEGMENT - 1) // SEGMENT
    factors = packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    for column in range(width):
        store(broadcast(zero, bias[column] if len(bias) else 0.0), packed, column * lanes)
    start = 0
    for top in range(0, height, ROWS):
        number = min(ROWS, height - top)
        start = _begin(counts, top, number, segments, start, entries)
        _pack(inputs, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + item(counts, (top + row) * segments + segment)
                entries[row] = end
                factor = load(zero, factors, row * lanes)
                for k in range(entry, end):
                    place = (features + item(offsets, k)) * lanes
                    total = load(zero, packed, place)
                    total = multiply_add(broadcast(zero, item(values, k)), factor, total)
                    store(total, packed, place)
    _unpack(packed, lanes, outputs, token * width, width, group, width)
    return int(group)


@compiled
def sddmm(
    left: Any,
    right: Any,
    tokens: int,
    counts: Any,
    offsets: Any,
    height: int,
    width: int,
    rows: tuple[int, int],
    start: int,
    products: Any,
    packed: Any,
) -> None:
    """Add the kept entries of some rows of ``left.t() @ right`` to ``products``."""
    token = 0
    while token < tokens:
        part = (left, right, token, tokens, counts, offsets, height, width, rows, start, products)
        if tokens - token > 64:
            token += _outer(zeros(LANES), *part, packed)
        elif tokens - token > 16:
            token += _outer(zeros(64), *part, packed)
        else:
            token += _outer(zeros(16), *part, packed)


@compiled
def _outer(
    zero: Any,
    left: Any,
    right: Any,
    token: int,
    tokens: int,
    counts: Any,
    offsets: Any,
    height: int,
    width: int,
    rows: tuple[int, int],
    start: int,
    products: Any,
    packed: Any,
) -> int:
    lanes = lanes_of(zero)
    group = min(lanes, tokens - token)
    segments = (width + SEGMENT - 1) // SEGMENT
    factors = packed[width * lanes :]
    entries = np.empty(ROWS, np.intp)
    _pack(right, token * width, width, group, width, packed, lanes)
    for top in range(rows[0], rows[1], ROWS):
        number = min(ROWS, rows[1] - top)
        start = _begin(counts, top, number, segments, start, entries)
        _pack(left, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments):
            features = segment * SEGMENT
            for row in range(number):
                entry = item(entries, row)
                end = entry + item(counts, (top + row) * segments + segment)
                entries[row] = end
                factor = load(zero, factors, row * lanes)
                for k in range(entry, end):
                    feature = load(zero, packed, (features + item(offsets, k)) * lanes)
                    products[k] += dot(factor, feature)
    return int(group)


@compiled
def _begin(counts: Any, top: int, rows: int, segments: int, start: int, entries: Any) -> int:
    """Write the first kept entry of each of some rows; return the first one after them."""
    for row in range(rows):
        entries[row] = start
        for segment in range(segments):
            start += item(counts, (top + row) * segments + segment)
    return start


@compiled
def _pack(
    source: Any, at: int, stride: int, tokens: int, features: int, packed: Any, lanes: int
) -> None:
    """Write a matrix of tokens x features to ``packed``: the lanes of each feature side by side.

    Lanes without a token become zero.
    """
    whole_tokens, whole_features = tokens // 16 * 16, features // 16 * 16
    for token in range(0, whole_tokens, 16):
        line = at + token * stride
        for feature in range(0, whole_features, 16):
            transpose(source, line + feature, stride, packed, feature * lanes + token, lanes)
        for feature in range(whole_features, features):
            for lane in range(16):
                packed[feature * lanes + token + lane] = item(
                    source, line + lane * stride + feature
                )
    for token in range(whole_tokens, tokens):
        for feature in range(features):
            packed[feature * lanes + token] = item(source, at + token * stride + feature)
    for feature in range(features):
        for token in range(tokens, lanes):
            packed[feature * lanes + token] = 0


@compiled
def _unpack(
    packed: Any, lanes: int, target: Any, at: int, stride: int, tokens: int, features: int
) -> None:
    """Write what :func:`_pack` packed back to a matrix of tokens x features."""
    whole_tokens, whole_features = tokens // 16 * 16, features // 16 * 16
    for token in range(0, whole_tokens, 16):
        line = at + token * stride
        for feature in range(0, whole_features, 16):
            transpose(packed, feature * lanes + token, lanes, target, line + feature, stride)
        for feature in range(whole_features, features):
            for lane in range(16):
                target[line + lane * stride + feature] = item(
                    packed, feature * lanes + token + lane
                )
    for token in range(whole_tokens, tokens):
        for feature in range(features):
            target[at + token * stride + feature] = item(packed, feature * lanes + token)
