"""Multiplies a single token by unpruned values, in about the time of reading the weight.

With the transposed weight the lanes of a vector are values, not tokens. Where the processor has
AVX-512, the inputs of a segment lie in registers, and an instruction permutes them to the order of
a row's values (:func:`by_segments`). Elsewhere they are loaded one by one (:func:`by_columns`). The
two add in different orders. With the weight as it is stored, values are multiplied one by one
(:func:`one_token_spmm`): each changes another output. That gives the bits of ``products.spmm``.

The functions take what those of ``products.py`` take, in float32. The transposed weight may have
int8 values, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lightning_axosparse.sparse.kernels import SEGMENT, Span, Weight
from lightning_axosparse.sparse.kernels.runs import (
    first_entries,
    nnz_in,
    prefetch_entries,
    segments_of,
)
from lightning_axosparse.support import llvm
from lightning_axosparse.support.llvm import HAS_AVX512, REGISTER
from lightning_axosparse.support.vectors import (
    broadcast,
    compiled,
    item,
    load,
    multiply_add,
    store,
    total_of,
    zeros,
)

AT_ONCE = 32
"""Unpruned entries of which :func:`store_columns` writes the columns."""

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
        ahead = start = first_entries(weight, top, number, start, entries)
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
                        sums[row * 16] += np.float32(item(values, k)) * factor
                    continue
                total = load(zeros(16), sums, row * 16)
                # Always two vectors: where a second one followed if there were more than 16
                # entries, the processor guessed wrong whether it would, which took longer.
                ahead += end - entry
                while entry < end:
                    prefetch_entries(weight, ahead)
                    total = add_products_from_registers(
                        total, features, values, offsets, entry, end - entry
                    )
                    total = add_products_from_registers(
                        total, features, values, offsets, entry + 16, end - entry - 16
                    )
                    entry += AT_ONCE
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
            place = np.intp(item(columns, k))
            total += np.float32(item(values, start + k)) * item(inputs, place)
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


@intrinsic
def store_columns(_: Any, offsets: Any, entry: Any, first: Any, columns: Any, at: Any) -> Any:
    """Write the columns of ``AT_ONCE`` unpruned entries.

    Args:
        offsets: the flat array of uint8 offsets.
        entry: the first unpruned entry.
        first: the column from which the offsets count.
        columns: the flat array to write, int32.
        at: where in it to write.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        offsets, entry, first, columns, at = args
        kinds, wide = signature.args, ir.VectorType(llvm.INT32, AT_ONCE)
        loaded = llvm.load(
            builder, _bytes(AT_ONCE), llvm.pointer(context, builder, kinds[0], offsets, entry)
        )
        start = llvm.splat(builder, builder.trunc(first, llvm.INT32), AT_ONCE)
        places = builder.add(builder.zext(loaded, wide), start)
        llvm.store(builder, places, llvm.pointer(context, builder, kinds[3], columns, at))
        return context.get_dummy_value()

    place = types.intp
    return types.void(offsets, place, place, columns, place), generate


@intrinsic
def add_products_from_memory(
    _: Any, total: Any, values: Any, entry: Any, inputs: Any, columns: Any, at: Any
) -> Any:
    """Add products with inputs in memory to the lanes of ``total``, one value for each lane.

    The processor's gather instructions, and loads with a mask, took twice as long.

    Args:
        total: a vector.
        values: the flat array of unpruned values.
        entry: the first of them.
        inputs: the flat array of the other factors.
        columns: the flat array of their places in ``inputs``, int32.
        at: that of the first unpruned value in ``columns``.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, values, entry, inputs, columns, at = args
        kinds = signature.args
        pointer = llvm.pointer(context, builder, kinds[1], values, entry)
        factors = llvm.load_factors(builder, total.type, kinds[1], pointer)
        loaded = ir.Constant(total.type, ir.Undefined)
        for lane in range(total.type.count):
            there = builder.add(at, ir.Constant(at.type, lane))
            column = builder.load(llvm.pointer(context, builder, kinds[4], columns, there))
            place = builder.sext(column, at.type)
            number = builder.load(llvm.pointer(context, builder, kinds[3], inputs, place))
            loaded = builder.insert_element(loaded, number, ir.Constant(llvm.INT32, lane))
        return llvm.fma(builder, factors, loaded, total)

    place = types.intp
    return total(total, values, place, inputs, columns, place), generate


@intrinsic
def add_products_from_registers(
    _: Any, total: Any, segment: Any, values: Any, offsets: Any, entry: Any, number: Any
) -> Any:
    """Add products with inputs in registers, those of a segment, to the lanes of ``total``.

    AVX-512 permutes 16 of them at once (``HAS_AVX512``).

    Args:
        total: a vector of 16 numbers.
        segment: a vector of 256 numbers.
        values: the flat array of unpruned values.
        offsets: the flat array of their offsets in the segment, uint8.
        entry: the first unpruned value; it and the next 15 are read, from both arrays.
        number: how many of them are multiplied; all, if more than 16.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, segment, values, offsets, entry, number = args
        kinds, integers = signature.args, ir.VectorType(llvm.INT32, REGISTER)
        pointer = llvm.pointer(context, builder, kinds[3], offsets, entry)
        places = builder.zext(llvm.load(builder, _bytes(REGISTER), pointer), integers)
        inputs = _permute(builder, segment, places)
        pointer = llvm.pointer(context, builder, kinds[2], values, entry)
        factors = llvm.load_factors(builder, total.type, kinds[2], pointer)
        chosen = _first(builder, builder.trunc(number, llvm.INT32), REGISTER)
        return builder.select(chosen, llvm.fma(builder, factors, inputs, total), total)

    place = types.intp
    return total(total, segment, values, offsets, place, place), generate


def _permute(builder: Any, table: Any, places: Any) -> Any:
    """Return the numbers at ``places`` of a vector of 256 numbers.

    An instruction selects them among 32, and the upper bits of a place choose one of eight results.
    """
    numbers, integers = ir.VectorType(llvm.FLOAT, REGISTER), places.type
    kind = ir.FunctionType(numbers, [numbers, integers, numbers])
    name = "llvm.x86.avx512.vpermi2var.ps.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    lanes = range(0, table.type.count, REGISTER)
    parts = [llvm.shuffle(builder, table, table, list(range(i, i + REGISTER))) for i in lanes]
    results = [
        builder.call(permute, [low, places, high])
        for low, high in zip(parts[::2], parts[1::2], strict=True)
    ]
    bit = 2 * REGISTER
    while len(results) > 1:
        masked = builder.and_(places, ir.Constant(integers, [bit] * REGISTER))
        upper = builder.icmp_unsigned("!=", masked, ir.Constant(integers, None))
        pairs = zip(results[::2], results[1::2], strict=True)
        results, bit = [builder.select(upper, high, low) for low, high in pairs], 2 * bit
    return results[0]


def _first(builder: Any, number: Any, lanes: int) -> Any:
    """Return a mask of the first ``number`` lanes."""
    lane = ir.Constant(ir.VectorType(number.type, lanes), list(range(lanes)))
    return builder.icmp_signed("<", lane, llvm.splat(builder, number, lanes))


def _bytes(number: int) -> ir.VectorType:
    return ir.VectorType(llvm.BYTE, number)
