"""Multiplies by unpruned values on a CPU, in compiled code that reads them and their index once.

A product with a weight that is stored in segments (``formats.py``) runs over groups of tokens. The
numbers of one feature, for all tokens of a group, lie side by side and are one vector, so each
value is multiplied with a vector of consecutive numbers, whatever the pattern. A block of rows of
the weight is multiplied with one segment of columns before the next, so that the features of a
segment stay in the first caches. ``runs.py`` lists the entries of each row in each segment in this
order; those to come are prefetched.

Loads limit the speed, two at a time: a multiply-add reads its vector, and an entry has another for
its value. Four offsets are read by one.

Sums run over columns in ascending order: a token's result depends neither on the tokens beside it
nor on the number of threads.

Where the processor multiplies bfloat16, arrays may be of that dtype, too. An instruction adds the
products of two values to each lane, in float32. ``spmm`` has no such pairs, as each value changes
another sum. With many tokens, the weight is transposed for ``spmm_t`` instead.

The functions take flat arrays, and check nothing. Arrays of bfloat16 have the dtype uint16; biases,
outputs and the results of ``sddmm`` are float32. ``rows`` are those of the weight with which to
compute, ``start`` is the number of values before these, and ``runs`` are theirs. ``bias`` has one
number for each output or none. ``packed`` is memory for ``LANES * (width + ROWS_OF_FACTORS)``
numbers of float32, but in ``spmm_t`` for ``LANES * width``, with ``LANES * ROWS_OF_SUMS`` in
``sums``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from lightning_axosparse.sparse.kernels import (
    LANES,
    ROWS_OF_FACTORS,
    ROWS_OF_SUMS,
    SEGMENT,
    Span,
    Weight,
)
from lightning_axosparse.sparse.kernels.runs import (
    prefetch_run,
    read_run,
    runs_of,
    segments_of,
    sort_runs,
    transpose_weight,
)
from lightning_axosparse.support.llvm import HAS_BFLOAT16 as HAS_BFLOAT16
from lightning_axosparse.support.llvm import PAIRS, REGISTER
from lightning_axosparse.support.vectors import (
    add_dots,
    add_two_products,
    broadcast,
    compiled,
    four_offsets,
    interleave,
    item,
    lanes_of,
    load,
    multiply_add,
    operands_for,
    place_of,
    pointer_to,
    store,
    transpose_matrix,
    zeros,
    zeros_for,
)

_FEW_TOKENS = 64
"""Up to so many tokens, sorting runs takes longer than it saves."""

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
    runs = _runs_for(tokens, weight, rows, start, ROWS_OF_SUMS)
    _spmm_t(inputs, tokens, weight, rows, runs, bias, outputs, packed, sums)


@compiled
def transposed_spmm_t(
    inputs: Any,
    tokens: int,
    weight: Weight,
    columns: Span,
    memory: tuple[Any, Any],
    bias: Any,
    outputs: Any,
    packed: Any,
    sums: Any,
) -> None:
    """Compute some columns of ``inputs @ weight + bias``, the bits of :func:`spmm` in float32.

    ``memory`` is for the offsets and values of the weight, of which these columns are transposed.
    """
    offsets, values = memory
    runs = transpose_weight(weight, columns, offsets, values)
    # The counts are not those of the transpose; its runs have the numbers of its entries.
    transpose = Weight(weight.counts, offsets, weight.width, weight.height, values)
    _spmm_t(inputs, tokens, transpose, columns, runs, bias, outputs, packed, sums)


@compiled
def _spmm_t(
    inputs: Any,
    tokens: int,
    weight: Weight,
    rows: Span,
    runs: Any,
    bias: Any,
    outputs: Any,
    packed: Any,
    sums: Any,
) -> None:
    many, few = zeros_for(64, inputs), zeros_for(16, inputs)
    token = 0
    while token < tokens:
        part = (inputs, (token, tokens), weight, rows, runs, bias, outputs, packed, sums)
        if tokens - token > lanes_of(few):
            token += _spmm_t_of_group(many, *part)
        elif tokens - token > 8:
            token += _spmm_t_of_group(few, *part)
        else:
            token += _spmm_t_of_group(zeros_for(8, inputs), *part)


@compiled
def _spmm_t_of_group(
    zero: Any,
    inputs: Any,
    tokens: Span,
    weight: Weight,
    rows: Span,
    runs: Any,
    bias: Any,
    outputs: Any,
    packed: Any,
    sums: Any,
) -> int:
    lanes, width = lanes_of(zero), weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    values, offsets = pointer_to(weight.values), pointer_to(weight.offsets)
    _pack(inputs, token * width, width, group, width, packed, lanes)
    run = 0
    for top in range(rows[0], rows[1], ROWS_OF_SUMS):
        number = min(ROWS_OF_SUMS, rows[1] - top)
        for row in range(number):
            store(broadcast(zero, bias[top + row] if len(bias) else 0.0), sums, row * lanes)
        for segment in range(segments_of(weight)):
            features = pointer_to(packed[segment * SEGMENT * lanes :])
            for _ in range(number):
                row, entries = read_run(runs, run)
                prefetch_run(weight, runs, run)
                total = load(zero, sums, row * lanes)
                total = _add_products(total, values, offsets, entries, features)
                store(total, sums, row * lanes)
                run += 1
        to = token * weight.height + top
        transpose_matrix(sums, 0, lanes, number, group, outputs, to, weight.height)
    return int(group)


def _add_products(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    """Return ``total`` plus the products of a row's values in a segment with its features.

    Args:
        total: the sums, a vector.
        values: the unpruned values.
        offsets: their offsets in the segment.
        entries: the first of them, and the one after the last.
        features: the packed features of the segment.
    """
    raise NotImplementedError


@overload(_add_products, strict=False)
def _add_products_of_dtype(total: Any, values: Any, *_: Any) -> Any:
    return _add_float32 if values.dtype == types.float32 else _add_bfloat16


def _add_float32(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    (k, end), lanes = entries, lanes_of(total)
    while k + 4 <= end:
        a, b, c, d = four_offsets(offsets, k)
        total = _plus_product(total, item(values, k), features, a * lanes)
        total = _plus_product(total, item(values, k + 1), features, b * lanes)
        total = _plus_product(total, item(values, k + 2), features, c * lanes)
        total = _plus_product(total, item(values, k + 3), features, d * lanes)
        k += 4
    if k + 2 <= end:
        a, b = np.intp(item(offsets, k)), np.intp(item(offsets, k + 1))
        total = _plus_product(total, item(values, k), features, a * lanes)
        total = _plus_product(total, item(values, k + 1), features, b * lanes)
        k += 2
    if k < end:
        place = np.intp(item(offsets, k)) * lanes
        total = _plus_product(total, item(values, k), features, place)
    return total


@compiled
def _plus_product(total: Any, value: Any, features: Any, place: int) -> Any:
    return multiply_add(broadcast(total, value), load(total, features, place), total)


def _add_bfloat16(total: Any, values: Any, offsets: Any, entries: Any, features: Any) -> Any:
    (k, end), lanes = entries, lanes_of(total)
    while k + 2 <= end:
        a, b = np.intp(item(offsets, k)) * lanes, np.intp(item(offsets, k + 1)) * lanes
        total = add_two_products(total, values, k, features, (a, b))
        k += 2
    if k < end:
        place = np.intp(item(offsets, k)) * lanes
        total = add_two_products(total, values, k, features, (place,))
    return total


@compiled
def spmm(inputs: Any, tokens: Span, weight: Weight, bias: Any, outputs: Any, packed: Any) -> None:
    """Compute some rows of ``inputs @ weight + bias``."""
    runs = runs_of(weight, (0, weight.height), 0, ROWS_OF_FACTORS)
    token, end = tokens
    while token < end:
        part = (inputs, (token, end), weight, runs, bias, outputs, packed)
        if end - token > 16:
            token += _spmm_of_group(zeros(64), *part)
        elif end - token > 8:
            token += _spmm_of_group(zeros(16), *part)
        else:
            token += _spmm_of_group(zeros(8), *part)


@compiled
def _spmm_of_group(
    zero: Any,
    inputs: Any,
    tokens: Span,
    weight: Weight,
    runs: Any,
    bias: Any,
    outputs: Any,
    packed: Any,
) -> int:
    lanes, height, width = lanes_of(zero), weight.height, weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    factors = packed[width * lanes :]
    values, offsets = pointer_to(weight.values), pointer_to(weight.offsets)
    for column in range(width):
        store(broadcast(zero, bias[column] if len(bias) else 0.0), packed, column * lanes)
    run = 0
    for top in range(0, height, ROWS_OF_FACTORS):
        number = min(ROWS_OF_FACTORS, height - top)
        _pack(inputs, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            sums = pointer_to(packed[segment * SEGMENT * lanes :])
            for row in range(number):
                _, entries = read_run(runs, run)
                prefetch_run(weight, runs, run)
                factor = load(zero, factors, row * lanes)
                _add_to_sums(sums, values, offsets, entries, factor)
                run += 1
    transpose_matrix(packed, 0, lanes, width, group, outputs, token * width, width)
    return int(group)


@compiled
def _add_to_sums(sums: Any, values: Any, offsets: Any, entries: Span, factor: Any) -> None:
    """Add the products of a row's values in a segment with its factor to the sums of columns."""
    (k, end), lanes = entries, lanes_of(factor)
    while k + 4 <= end:
        a, b, c, d = four_offsets(offsets, k)
        _add_product(sums, a * lanes, item(values, k), factor)
        _add_product(sums, b * lanes, item(values, k + 1), factor)
        _add_product(sums, c * lanes, item(values, k + 2), factor)
        _add_product(sums, d * lanes, item(values, k + 3), factor)
        k += 4
    while k < end:
        _add_product(sums, np.intp(item(offsets, k)) * lanes, item(values, k), factor)
        k += 1


@compiled
def _add_product(sums: Any, place: int, value: Any, factor: Any) -> None:
    total = load(factor, sums, place)
    store(multiply_add(broadcast(factor, value), factor, total), sums, place)


@compiled
def sddmm(
    left: Any, right: Any, tokens: int, weight: Weight, rows: Span, start: int, packed: Any
) -> None:
    """Add the unpruned entries of some rows of ``left.t() @ right`` to the values of ``weight``."""
    runs = _runs_for(tokens, weight, rows, start, ROWS_OF_FACTORS)
    many, few = operands_for(64, left), operands_for(16, left)
    token = 0
    while token < tokens:
        part = (left, right, (token, tokens), weight, rows, runs, packed)
        if tokens - token > lanes_of(many):
            token += _sddmm_of_group(operands_for(_LANES_OF_SDDMM, left), *part)
        elif tokens - token > lanes_of(few):
            token += _sddmm_of_group(many, *part)
        else:
            token += _sddmm_of_group(few, *part)


@compiled
def _sddmm_of_group(
    zero: Any,
    left: Any,
    right: Any,
    tokens: Span,
    weight: Weight,
    rows: Span,
    runs: Any,
    packed: Any,
) -> int:
    lanes, height, width = lanes_of(zero), weight.height, weight.width
    token, group = tokens[0], min(lanes, tokens[1] - tokens[0])
    factors, offsets = packed[width * lanes :], pointer_to(weight.offsets)
    products = pointer_to(weight.values)
    _pack(right, token * width, width, group, width, packed, lanes)
    run = 0
    for top in range(rows[0], rows[1], ROWS_OF_FACTORS):
        number = min(ROWS_OF_FACTORS, rows[1] - top)
        _pack(left, token * height + top, height, group, number, factors, lanes)
        for segment in range(segments_of(weight)):
            features = pointer_to(packed[segment * SEGMENT * lanes :])
            for _ in range(number):
                row, entries = read_run(runs, run)
                factor = load(zero, factors, row * lanes)
                _add_dots(products, entries, factor, features, offsets)
                run += 1
    return int(group)


@compiled
def _add_dots(products: Any, entries: Span, factor: Any, features: Any, offsets: Any) -> None:
    """Add the dot products of a row's vector with the features of some unpruned entries.

    Four at a time share the instructions that add a vector's own numbers.
    """
    (k, end), lanes = entries, lanes_of(factor)
    while k + 4 <= end:
        a, b, c, d = four_offsets(offsets, k)
        add_dots(products, k, factor, features, (a * lanes, b * lanes, c * lanes, d * lanes))
        k += 4
    while k < end:
        add_dots(products, k, factor, features, (np.intp(item(offsets, k)) * lanes,))
        k += 1


@compiled
def _runs_for(tokens: int, weight: Weight, rows: Span, start: int, block: int) -> Any:
    """Return the runs of some rows, sorted if there are many tokens."""
    runs = runs_of(weight, rows, start, block)
    if tokens > _FEW_TOKENS:
        sort_runs(runs, weight, rows, block)
    return runs


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
    transpose_matrix(source, at, stride, tokens, features, packed, 0, lanes)
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
