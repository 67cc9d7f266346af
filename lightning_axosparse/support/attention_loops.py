"""Computes attention and its gradients on a CPU with AVX-512, a block of queries at a time.

A block's scores are computed, used and dropped, and computed again in the backward pass from the
logarithms of the softmax's sums, as in FlashAttention (Dao et al., NeurIPS 2022). Each row of
scores is computed as a whole, because those of a block fit into the caches.

``heads`` are the first of all heads of the batch, and the one after the last. Sizes of heads are
multiples of 16.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from lightning_axosparse.support.vectors import (
    add_tile,
    broadcast,
    compiled,
    exponential,
    lanes_of,
    largest_of,
    load,
    maximum,
    multiply_add,
    pointer_to,
    store,
    total_of,
    transpose_matrix,
    zeros,
)

COLUMNS = 64
"""Columns of a large tile of a product. With six rows, its sums take 24 of the 32 registers."""

_BLOCK = 48
"""Queries of a block, a multiple of a tile's rows."""


class Heads(NamedTuple):
    """Queries, keys, values, outputs or gradients, shape (batch, heads, tokens, size).

    Or a number for each token: shape (batch, heads, tokens).

    Attributes:
        numbers: a flat array, float32.
        batch: from a sequence of the batch to the next.
        head: from a head to the next.
        token: from a token to the next.
    """

    numbers: Any
    batch: int
    head: int
    token: int


class Shape(NamedTuple):
    """The sizes of a sequence's heads.

    Attributes:
        heads: how many there are.
        sharing: how many heads share keys and values, which have as many fewer heads.
        queries: how many each has.
        keys: likewise.
        size: the numbers of a query.
    """

    heads: int
    sharing: int
    queries: int
    keys: int
    size: int


class _Matrix(NamedTuple):
    """A matrix in a flat array: a pointer, where it begins, and the steps of rows and columns."""

    numbers: Any
    first: int
    row: int
    column: int


@compiled
def attend(
    shape: Shape,
    operands: tuple[Heads, Heads, Heads],
    heads: tuple[int, int],
    is_causal: bool,
    scale: float,
    outputs: Heads,
    logarithms: Heads,
) -> None:
    """Compute the outputs of some heads, and the logarithms of the softmax's sums.

    Args:
        shape: that of each head.
        operands: queries, keys and values.
        heads: the heads.
        is_causal: whether a query sees no key behind its own place.
        scale: the factor of scores, positive.
        outputs: where to write the outputs.
        logarithms: where to write these, a number for each query.
    """
    queries, keys, values = operands
    number, size = shape.keys, shape.size
    width = _whole_tiles(number)
    turned, scores = np.zeros(size * width, np.float32), np.empty(_BLOCK * width, np.float32)
    products, weights = _flat(turned, width), _flat(scores, width)
    for head in range(heads[0], heads[1]):
        place = head // shape.heads, head % shape.heads
        shared = place[0], place[1] // shape.sharing
        _transpose(keys, shared, number, size, turned, width)
        for first in range(0, shape.queries, _BLOCK):
            rows = min(_BLOCK, shape.queries - first)
            last = min(first + rows, number) if is_causal else number
            whole = _whole_tiles(last)
            _multiply(_rows(queries, place, first), products, weights, (rows, size, whole), False)
            for row in range(first, first + rows):
                seen = min(row + 1, number) if is_causal else number
                line = (row - first) * width, seen, whole
                at = _first(logarithms, place, row)
                logarithms.numbers[at] = _softmax(scores, line, scale)
            target = _rows(outputs, place, first)
            _multiply(weights, _rows(values, shared, 0), target, (rows, last, size), False)


@compiled
def attend_backward(
    shape: Shape,
    operands: tuple[Heads, Heads, Heads],
    heads: tuple[int, int],
    is_causal: bool,
    scale: float,
    outputs: Heads,
    logarithms: Heads,
    gradient: Heads,
    gradients: tuple[Heads, Heads, Heads],
) -> None:
    """Compute the gradients of some heads' queries, keys and values.

    Args:
        shape: as in :func:`attend`, and the next arguments, too.
        operands: queries, keys and values.
        heads: the heads, all that share keys and values.
        is_causal: whether a query sees no key behind its own place.
        scale: the factor of scores.
        outputs: what :func:`attend` wrote.
        logarithms: ditto.
        gradient: that of the outputs.
        gradients: where to write those of the queries, and to add those of the keys and values.
    """
    queries, keys, values = operands
    number, size = shape.keys, shape.size
    width = _whole_tiles(number)
    turned_keys, turned_values = np.zeros((2, size * width), np.float32)
    scores, slopes = np.empty((2, _BLOCK * width), np.float32)
    for head in range(heads[0], heads[1]):
        place = head // shape.heads, head % shape.heads
        shared = place[0], place[1] // shape.sharing
        _transpose(keys, shared, number, size, turned_keys, width)
        _transpose(values, shared, number, size, turned_values, width)
        for first in range(0, shape.queries, _BLOCK):
            rows = min(_BLOCK, shape.queries - first)
            last = min(first + rows, number) if is_causal else number
            sizes = rows, size, _whole_tiles(last)
            query, above = _rows(queries, place, first), _rows(gradient, place, first)
            _multiply(query, _flat(turned_keys, width), _flat(scores, width), sizes, False)
            _multiply(above, _flat(turned_values, width), _flat(slopes, width), sizes, False)
            for row in range(first, first + rows):
                seen = min(row + 1, number) if is_causal else number
                line = (row - first) * width, seen, sizes[2]
                product = _dot(_rows(gradient, place, row), _rows(outputs, place, row), size)
                sums = logarithms.numbers[_first(logarithms, place, row)], product
                _softmax_backward(scores, slopes, line, scale, sums)
            target, sizes = _rows(gradients[0], place, first), (rows, last, size)
            _multiply(_flat(slopes, width), _rows(keys, shared, 0), target, sizes, False)
            sizes = last, rows, size
            _multiply(_turned(slopes, width), query, _rows(gradients[1], shared, 0), sizes, True)
            _multiply(_turned(scores, width), above, _rows(gradients[2], shared, 0), sizes, True)


@compiled
def _whole_tiles(number: int) -> int:
    return (number + COLUMNS - 1) // COLUMNS * COLUMNS


@compiled
def _rows(heads: Heads, place: tuple[int, int], first: int) -> _Matrix:
    """Return the matrix of a head's tokens from the first on; ``place`` is its place."""
    return _Matrix(pointer_to(heads.numbers), _first(heads, place, first), heads.token, 1)


@compiled
def _first(heads: Heads, place: tuple[int, int], token: int) -> int:
    """Return where the numbers of a head's token begin."""
    return place[0] * heads.batch + place[1] * heads.head + token * heads.token


@compiled
def _flat(array: Any, width: int) -> _Matrix:
    return _Matrix(pointer_to(array), 0, width, 1)


@compiled
def _turned(array: Any, width: int) -> _Matrix:
    return _Matrix(pointer_to(array), 0, 1, width)


@compiled
def _transpose(
    heads: Heads, place: tuple[int, int], tokens: int, size: int, target: Any, width: int
) -> None:
    """Write the transpose of a head's matrix, with rows of ``width`` numbers."""
    numbers, first, step, _ = _rows(heads, place, 0)
    transpose_matrix(numbers, first, step, tokens, size, target, 0, width)


@compiled
def _multiply(
    left: _Matrix, right: _Matrix, target: _Matrix, shape: tuple[int, int, int], adds: bool
) -> None:
    """Write the product of two matrices to the target, or add it.

    ``shape`` are the rows of the left matrix, its columns, and those of the right one, a multiple
    of 16.
    """
    rows, number, columns = shape
    matrices, column = (left, right, target), 0
    while column < columns:
        if columns - column >= COLUMNS:
            column += _add_column(zeros(COLUMNS), matrices, column, rows, number, adds)
        elif columns - column >= 32:
            column += _add_column(zeros(32), matrices, column, rows, number, adds)
        else:
            column += _add_column(zeros(16), matrices, column, rows, number, adds)


@compiled
def _add_column(zero: Any, matrices: Any, column: int, rows: int, number: int, adds: bool) -> int:
    """Compute the tiles with these columns of the target, and return the number of columns."""
    row = 0
    while row < rows:
        if rows - row >= 6:
            add_tile(6, zero, matrices, (row, column), number, adds)
            row += 6
        elif rows - row >= 2:
            add_tile(2, zero, matrices, (row, column), number, adds)
            row += 2
        else:
            add_tile(1, zero, matrices, (row, column), number, adds)
            row += 1
    return int(lanes_of(zero))


@compiled
def _softmax(scores: Any, line: tuple[int, int, int], scale: float) -> Any:
    """Replace a row of scores by their softmax, and return the logarithm of the sum.

    Args:
        scores: the flat array.
        line: where the row begins, how many scores it has, and how many numbers to write, a
            multiple of ``COLUMNS``: those behind the scores become zero.
        scale: the factor of scores.
    """
    at, seen, whole = line
    for k in range(at + seen, at + whole):
        scores[k] = -np.inf
    top = load(zeros(COLUMNS), scores, at)
    for k in range(at + COLUMNS, at + whole, COLUMNS):
        top = maximum(top, load(top, scores, k))
    factor = np.float32(scale)
    shift = -largest_of(top) * factor
    factors, shifts, total = broadcast(top, factor), broadcast(top, shift), zeros(COLUMNS)
    for k in range(at, at + whole, COLUMNS):
        weights = exponential(multiply_add(load(top, scores, k), factors, shifts))
        store(weights, scores, k)
        total = multiply_add(weights, broadcast(total, np.float32(1)), total)
    denominator = total_of(total)
    factors = broadcast(top, np.float32(1) / denominator)
    for k in range(at, at + whole, COLUMNS):
        store(multiply_add(load(top, scores, k), factors, zeros(COLUMNS)), scores, k)
    return np.float32(math.log(denominator)) - shift


@compiled
def _softmax_backward(
    scores: Any, slopes: Any, line: tuple[int, int, int], scale: float, sums: tuple[Any, Any]
) -> None:
    """Replace a row of scores by their softmax, and its gradients by those of the scores.

    Args:
        scores: the flat array of scores.
        slopes: that of the gradients.
        line: as in :func:`_softmax`.
        scale: the factor of scores.
        sums: what :func:`_softmax` returned, and the softmax's product with its gradients.
    """
    at, seen, whole = line
    for k in range(at + seen, at + whole):
        scores[k] = -np.inf
    nothing, factor = zeros(COLUMNS), np.float32(scale)
    factors = broadcast(nothing, factor)
    shifts, products = broadcast(nothing, -sums[0]), broadcast(nothing, -sums[1] * factor)
    for k in range(at, at + whole, COLUMNS):
        weights = exponential(multiply_add(load(nothing, scores, k), factors, shifts))
        store(weights, scores, k)
        slope = multiply_add(load(nothing, slopes, k), factors, products)
        store(multiply_add(weights, slope, nothing), slopes, k)


@compiled
def _dot(left: _Matrix, right: _Matrix, size: int) -> Any:
    """Return the product of the first rows of two matrices."""
    total = zeros(16)
    for k in range(0, size, lanes_of(total)):
        numbers = load(total, left.numbers, left.first + k)
        total = multiply_add(numbers, load(total, right.numbers, right.first + k), total)
    return total_of(total)
