"""Compiles loops with numba, and gives them vectors of float32 that stay in registers.

numba has no such type, and it vectorizes no loop over a small array without writing the array back
to memory at every turn. A vector may be wider than the processor's registers: LLVM splits it.
Offsets into arrays count entries; nothing checks them. Arrays of bfloat16 have the dtype uint16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from lightning_axosparse.support import llvm
from lightning_axosparse.support.llvm import PAIRS, REGISTER

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop for the types that it is called with; numba caches it in a file."""
    loop: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return loop


class Vector(types.Type):
    """The type of a vector of ``lanes`` numbers: float32, int32 or bfloat16."""

    def __init__(self, lanes: int, dtype: types.Type = types.float32) -> None:
        self.lanes, self.dtype = lanes, dtype
        super().__init__(f"Vector({lanes}, {dtype})")

    @property
    def ir(self) -> ir.VectorType:
        """The type in LLVM."""
        elements = {types.float32: llvm.FLOAT, types.int32: llvm.INT32}
        return ir.VectorType(elements.get(self.dtype, llvm.INT16), self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir)


@intrinsic(prefer_literal=True)
def zeros(_: Any, lanes: Any) -> Any:
    """Return a vector of zeros; ``lanes`` is a literal."""
    vector = Vector(lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(vector.ir, None)

    return vector(lanes), generate


@intrinsic(prefer_literal=True)
def zeros_for(_: Any, lanes: Any, array: Any) -> Any:
    """Return ``lanes`` zeros for as many numbers of ``array``, in bfloat16 for twice as many."""
    sums = Vector(_lanes_of(lanes, array))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(sums.ir, None)

    return sums(lanes, array), generate


@intrinsic(prefer_literal=True)
def operands_for(_: Any, lanes: Any, array: Any) -> Any:
    """Return what :func:`zeros_for` does, of the dtype of ``array``."""
    operands = Vector(_lanes_of(lanes, array), array.dtype)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(operands.ir, None)

    return operands(lanes, array), generate


def _lanes_of(lanes: Any, array: Any) -> int:
    number: int = lanes.literal_value
    return number if array.dtype == types.float32 else max(PAIRS, 2 * number)


@intrinsic
def pointer_to(_: Any, array: Any) -> Any:
    """Return the flat ``array`` in a form for which numba counts no references in inner loops."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def lanes_of(_: Any, vector: Any) -> Any:
    """Return how many numbers a vector has."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, vector.lanes)

    return types.intp(vector), generate


@intrinsic
def load(_: Any, like: Any, array: Any, offset: Any) -> Any:
    """Return a vector like ``like`` of the numbers in the flat ``array`` from ``offset`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, array, offset = args
        return llvm.load(
            builder, like.ir, llvm.pointer(context, builder, signature.args[1], array, offset)
        )

    return like(like, array, types.intp), generate


@intrinsic
def store(_: Any, vector: Any, array: Any, offset: Any) -> Any:
    """Write ``vector`` to the flat ``array`` from ``offset`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, array, offset = args
        llvm.store(builder, value, llvm.pointer(context, builder, signature.args[1], array, offset))
        return context.get_dummy_value()

    return types.void(vector, array, types.intp), generate


@intrinsic
def item(_: Any, array: Any, offset: Any) -> Any:
    """Return the number at ``offset`` of the flat ``array``.

    ``array[offset]`` would test at each turn whether the offset counts from the end.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(llvm.pointer(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), generate


@intrinsic
def four_offsets(_: Any, offsets: Any, at: Any) -> Any:
    """Return four consecutive numbers of the flat array ``offsets``, uint8, by one load.

    The products are bound by loads.
    """
    tuple_type = types.UniTuple(types.intp, 4)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = llvm.pointer(context, builder, signature.args[0], *args)
        word = builder.load(builder.bitcast(place, llvm.INT32.as_pointer()), align=1)
        size = context.get_value_type(types.intp)
        shifted = [builder.lshr(word, ir.Constant(llvm.INT32, 8 * i)) for i in range(4)]
        numbers = [
            builder.zext(builder.and_(number, ir.Constant(llvm.INT32, 255)), size)
            for number in shifted
        ]
        return context.make_tuple(builder, tuple_type, numbers)

    return tuple_type(offsets, types.intp), generate


@intrinsic
def broadcast(_: Any, like: Any, number: Any) -> Any:
    """Return a vector like ``like`` of which each number is the float32 ``number``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.splat(builder, args[1], like.lanes)

    return like(like, types.float32), generate


@intrinsic
def multiply_add(_: Any, left: Any, right: Any, total: Any) -> Any:
    """Return ``left * right + total``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, total = args
        return llvm.fma(builder, left, right, total)

    return total(left, right, total), generate


@intrinsic
def maximum(_: Any, left: Any, right: Any) -> Any:
    """Return the larger of each two numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return left(left, right), generate


@intrinsic
def largest_of(_: Any, vector: Any) -> Any:
    """Return the largest number of a vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(llvm.FLOAT, [vector.ir])
        name = f"llvm.vector.reduce.fmax.v{vector.lanes}f32"
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)

    return types.float32(vector), generate


@intrinsic
def exponential(_: Any, vector: Any) -> Any:
    """Return e to the power of each number, which is at most 88; zero below -87."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return llvm.exponential(builder, *args)

    return vector(vector), generate


@intrinsic(prefer_literal=True)
def add_tile(
    _: Any, rows: Any, zero: Any, matrices: Any, place: Any, number: Any, adds: Any
) -> Any:
    """Compute a tile of a product of matrices, whose sums stay in registers.

    Args:
        rows: rows of the tile, a literal.
        zero: a vector of as many zeros as the tile has columns.
        matrices: the left and the right one, and the target: tuples of a pointer, the place where
            the matrix begins, and the steps of its rows and columns. The latter is 1 in the last
            two.
        place: the row and the column of the target at which the tile begins.
        number: columns of the left matrix.
        adds: whether to add the product to the target instead of writing it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        unpack = partial(cgutils.unpack_tuple, builder)
        left, right, target = map(unpack, unpack(args[2]))
        top, side = unpack(args[3])
        lines = [builder.add(top, ir.Constant(top.type, row)) for row in range(rows.literal_value)]

        def address(matrix: Any, row: Any, column: Any) -> Any:
            pointer, first, down, along = matrix
            steps = builder.add(builder.mul(row, down), builder.mul(column, along))
            return builder.gep(pointer, [builder.add(first, steps)])

        def vector(matrix: Any, row: Any) -> Any:
            return llvm.load(builder, zero.ir, address(matrix, row, side))

        right[3] = target[3] = ir.Constant(top.type, 1)
        totals = [cgutils.alloca_once(builder, zero.ir) for _ in lines]
        for line, total in zip(lines, totals, strict=True):
            before = builder.select(args[5], vector(target, line), ir.Constant(zero.ir, None))
            builder.store(before, total)
        with cgutils.for_range(builder, args[4]) as loop:
            other = vector(right, loop.index)
            for line, total in zip(lines, totals, strict=True):
                factor = builder.load(address(left, line, loop.index))
                factor = llvm.splat(builder, factor, zero.lanes)
                builder.store(llvm.fma(builder, factor, other, builder.load(total)), total)
        for line, total in zip(lines, totals, strict=True):
            llvm.store(builder, builder.load(total), address(target, line, side))
        return context.get_dummy_value()

    return types.void(rows, zero, matrices, place, number, adds), generate


@intrinsic
def add_dots(_: Any, sums: Any, at: Any, factor: Any, features: Any, places: Any) -> Any:
    """Add dot products with a vector to consecutive numbers, each as if it were the only one.

    Args:
        sums: the flat array of the numbers, float32.
        at: the first of them.
        factor: the vector.
        features: the flat array in which the other vectors lie, of the same dtype.
        places: where each of these begins: a tuple of 1, 2 or 4 offsets.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, at, vector, features, places = args
        add, size = (
            (llvm.fma, REGISTER) if factor.dtype == types.float32 else (llvm.add_pairs, PAIRS)
        )
        part_type, kinds = ir.VectorType(factor.ir.element, size), signature.args
        offsets = cgutils.unpack_tuple(builder, places)
        totals = [ir.Constant(ir.VectorType(llvm.FLOAT, REGISTER), None)] * len(offsets)
        for first in range(0, factor.lanes, size):
            part = llvm.shuffle(builder, vector, vector, list(range(first, first + size)))
            for i, offset in enumerate(offsets):
                there = builder.add(offset, ir.Constant(offset.type, first))
                pointer = llvm.pointer(context, builder, kinds[3], features, there)
                totals[i] = add(builder, part, llvm.load(builder, part_type, pointer), totals[i])
        added = llvm.sums_of(builder, totals)
        pointer = llvm.pointer(context, builder, kinds[0], sums, at)
        llvm.store(builder, builder.fadd(llvm.load(builder, added.type, pointer), added), pointer)
        return context.get_dummy_value()

    return types.void(sums, types.intp, factor, features, places), generate


@intrinsic
def add_two_products(_: Any, total: Any, values: Any, k: Any, inputs: Any, places: Any) -> Any:
    """Return ``total`` plus the products of one or two values with vectors, in bfloat16.

    Args:
        total: a vector of float32.
        values: the flat array of the values.
        k: the first of them.
        inputs: the flat array of the vectors, as :func:`interleave` writes them.
        places: where each begins: a tuple of 1 or 2 offsets.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, values, k, inputs, places = args
        kinds, offsets = signature.args, cgutils.unpack_tuple(builder, places)
        pair, part_type = ir.VectorType(llvm.INT16, len(offsets)), ir.VectorType(llvm.INT16, PAIRS)
        factors = llvm.load(builder, pair, llvm.pointer(context, builder, kinds[1], values, k))
        lanes = [min(lane % 2, len(offsets)) for lane in range(PAIRS)]
        factors = llvm.shuffle(builder, factors, ir.Constant(pair, None), lanes)
        parts = []
        for first in range(0, total.type.count, PAIRS):
            vectors = [ir.Constant(part_type, None)] * 2
            for i, offset in enumerate(offsets):
                there = builder.add(offset, ir.Constant(offset.type, first))
                pointer = llvm.pointer(context, builder, kinds[3], inputs, there)
                vectors[i] = llvm.load(builder, part_type, pointer)
            for half in range(2):
                at = first + half * REGISTER
                part = llvm.shuffle(builder, total, total, list(range(at, at + REGISTER)))
                lanes = [
                    8 * (lane // 8) + 4 * half + lane % 8 // 2 + lane % 2 * PAIRS
                    for lane in range(PAIRS)
                ]
                parts.append(
                    llvm.add_pairs(
                        builder, llvm.shuffle(builder, vectors[0], vectors[1], lanes), factors, part
                    )
                )
        return llvm.joined(builder, parts)

    return total(total, values, types.intp, inputs, places), generate


@intrinsic
def prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line at ``offset`` of the flat ``array``; it may lie outside."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = llvm.pointer(context, builder, signature.args[0], *args)
        byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.type, llvm.INT32, llvm.INT32, llvm.INT32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, closest, data = 0, 3, 1
        builder.call(function, [byte, *(ir.Constant(llvm.INT32, n) for n in (read, closest, data))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def total_of(_: Any, vector: Any) -> Any:
    """Return the sum of a vector's numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(
            llvm.sums_of(builder, list(args)), ir.Constant(llvm.INT32, 0)
        )

    return types.float32(vector), generate


@intrinsic
def transpose(_: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, step: Any) -> Any:
    """Write the transposed of a block of ``REGISTER`` x ``REGISTER`` numbers.

    Args:
        source: the flat array to read.
        at: offset of the block.
        stride: from one of its rows to the next.
        target: the flat array to write.
        to: offset of the transposed block.
        step: from one of its rows to the next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, stride, target, to, step = args
        vector = ir.VectorType(llvm.FLOAT, REGISTER)

        def row_of(which: int, array: Any, offset: Any, row: int, stride: Any) -> Any:
            kind = signature.args[which]
            return llvm.row_pointer(context, builder, kind, array, offset, row, stride)

        rows = [
            llvm.load(builder, vector, row_of(0, source, at, row, stride))
            for row in range(REGISTER)
        ]
        for row, column in enumerate(llvm.transposed(builder, rows)):
            llvm.store(builder, column, row_of(3, target, to, row, step))
        return context.get_dummy_value()

    place = types.intp
    return types.void(source, place, place, target, place, place), generate


@compiled
def transpose_matrix(
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


@intrinsic
def interleave(_: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, step: Any) -> Any:
    """Write the transposed of a block of 32 x 32 numbers in bfloat16, with AVX-512.

    :func:`place_of` is the place of a row in the columns that are written.

    Args:
        source: the flat array to read.
        at: offset of the block.
        stride: from one of its rows to the next.
        target: the flat array to write.
        to: offset of the transposed block.
        step: from one of its rows to the next.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, at, stride, target, to, step = args
        words, halves = ir.VectorType(llvm.INT32, REGISTER), ir.VectorType(llvm.INT16, PAIRS)

        def row_of(which: int, array: Any, offset: Any, row: int, stride: Any) -> Any:
            kind = signature.args[which]
            return llvm.row_pointer(context, builder, kind, array, offset, row, stride)

        rows = [
            llvm.load(builder, words, row_of(0, source, at, row, stride)) for row in range(PAIRS)
        ]
        blocks = [
            llvm.transposed(builder, rows[:REGISTER]),
            llvm.transposed(builder, rows[REGISTER:]),
        ]
        for row, pair in enumerate(zip(*blocks, strict=True)):
            upper, lower = (builder.bitcast(words, halves) for words in pair)
            for odd in range(2):
                lanes = [0] * PAIRS
                for lane in range(PAIRS):
                    lanes[_place(lane)] = lane % REGISTER * 2 + odd + lane // REGISTER * PAIRS
                column = llvm.shuffle(builder, upper, lower, lanes)
                llvm.store(builder, column, row_of(3, target, to, 2 * row + odd, step), align=2)
        return context.get_dummy_value()

    place = types.intp
    return types.void(source, place, place, target, place, place), generate


def _place(row: int) -> int:
    """Return the place of one of 32 numbers among those that :func:`interleave` writes.

    The instruction that alternates the numbers of two vectors takes four from each quarter of a
    register. In this order, it gives 16 consecutive rows.
    """
    return row % 16 // 4 * 8 + row // 16 * 4 + row % 4


place_of = compiled(_place)
"""Return that place, in a loop."""
