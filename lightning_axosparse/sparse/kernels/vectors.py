"""Compiles loops with numba, and gives them vectors of float32 that stay in registers.

numba has no such type, and it vectorizes no loop over a small array without writing the array back
to memory at every turn. A vector may be wider than the processor's registers: LLVM splits it.
Offsets into arrays count entries; nothing checks them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numba
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from llvmlite import ir
from numba import types
from numba.core import cgutils, event
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, register_model

_FLOAT = ir.FloatType()
_INDEX = ir.IntType(32)

HAS_AVX512 = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Whether this processor has the instructions of :func:`add_products_from_registers`."""

REGISTER = 16 if HAS_AVX512 else 8
"""float32 numbers in a vector register of this processor, or fewer."""

AT_ONCE = 32
"""Unpruned entries of which :func:`store_columns` writes the columns."""


class Vector(types.Type):
    """The type of a vector of ``lanes`` float32 numbers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(f"Vector({lanes})")

    @property
    def ir(self) -> ir.VectorType:
        """The type in LLVM."""
        return ir.VectorType(_FLOAT, self.lanes)


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
        return _load(builder, like.ir, _pointer(context, builder, signature.args[1], array, offset))

    return like(like, array, types.intp), generate


@intrinsic
def store(_: Any, vector: Any, array: Any, offset: Any) -> Any:
    """Write ``vector`` to the flat ``array`` from ``offset`` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, array, offset = args
        _store(builder, value, _pointer(context, builder, signature.args[1], array, offset))
        return context.get_dummy_value()

    return types.void(vector, array, types.intp), generate


@intrinsic
def item(_: Any, array: Any, offset: Any) -> Any:
    """Return the number at ``offset`` of the flat ``array``.

    ``array[offset]`` would test at each turn whether the offset counts from the end.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(context, builder, signature.args[0], *args))

    return array.dtype(array, types.intp), generate


@intrinsic
def broadcast(_: Any, like: Any, number: Any) -> Any:
    """Return a vector like ``like`` of which each number is the float32 ``number``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[1], like.lanes)

    return like(like, types.float32), generate


@intrinsic
def multiply_add(_: Any, left: Any, right: Any, total: Any) -> Any:
    """Return ``left * right + total``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        left, right, total = args
        return _fma(builder, left, right, total)

    return total(left, right, total), generate


@intrinsic
def add_dots(_: Any, sums: Any, at: Any, factor: Any, features: Any, places: Any) -> Any:
    """Add dot products with a vector to consecutive numbers, each as if it were the only one.

    Args:
        sums: the flat array of the numbers.
        at: the first of them.
        factor: the vector.
        features: the flat array in which the other vectors lie.
        places: where each of these begins: a tuple of 1, 2 or 4 offsets.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, at, vector, features, places = args
        part_type, kinds = ir.VectorType(_FLOAT, REGISTER), signature.args
        offsets = cgutils.unpack_tuple(builder, places)
        totals = [ir.Constant(part_type, None)] * len(offsets)
        for first in range(0, factor.lanes, REGISTER):
            part = _shuffle(builder, vector, vector, list(range(first, first + REGISTER)))
            for i, offset in enumerate(offsets):
                there = builder.add(offset, ir.Constant(offset.type, first))
                pointer = _pointer(context, builder, kinds[3], features, there)
                totals[i] = _fma(builder, part, _load(builder, part_type, pointer), totals[i])
        added = _sums(builder, totals)
        pointer = _pointer(context, builder, kinds[0], sums, at)
        _store(builder, builder.fadd(_load(builder, added.type, pointer), added), pointer)
        return context.get_dummy_value()

    return types.void(sums, types.intp, factor, features, places), generate


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
        kinds, wide = signature.args, ir.VectorType(_INDEX, AT_ONCE)
        loaded = _load(
            builder, _bytes(AT_ONCE), _pointer(context, builder, kinds[0], offsets, entry)
        )
        start = _splat(builder, builder.trunc(first, _INDEX), AT_ONCE)
        places = builder.add(builder.zext(loaded, wide), start)
        _store(builder, places, _pointer(context, builder, kinds[3], columns, at))
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
        factors = _load(builder, total.type, _pointer(context, builder, kinds[1], values, entry))
        loaded = ir.Constant(total.type, ir.Undefined)
        for lane in range(total.type.count):
            there = builder.add(at, ir.Constant(at.type, lane))
            column = builder.load(_pointer(context, builder, kinds[4], columns, there))
            place = builder.sext(column, at.type)
            number = builder.load(_pointer(context, builder, kinds[3], inputs, place))
            loaded = builder.insert_element(loaded, number, ir.Constant(_INDEX, lane))
        return _fma(builder, factors, loaded, total)

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
        kinds, integers = signature.args, ir.VectorType(_INDEX, REGISTER)
        pointer = _pointer(context, builder, kinds[3], offsets, entry)
        places = builder.zext(_load(builder, _bytes(REGISTER), pointer), integers)
        inputs = _permute(builder, segment, places)
        pointer = _pointer(context, builder, kinds[2], values, entry)
        factors = _load(builder, total.type, pointer)
        chosen = _first(builder, builder.trunc(number, _INDEX), REGISTER)
        return builder.select(chosen, _fma(builder, factors, inputs, total), total)

    place = types.intp
    return total(total, segment, values, offsets, place, place), generate


@intrinsic
def prefetch(_: Any, array: Any, offset: Any) -> Any:
    """Prefetch the cache line at ``offset`` of the flat ``array``; it may lie outside."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, signature.args[0], *args)
        byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.type, _INDEX, _INDEX, _INDEX])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, closest, data = 0, 3, 1
        builder.call(function, [byte, *(ir.Constant(_INDEX, n) for n in (read, closest, data))])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def total_of(_: Any, vector: Any) -> Any:
    """Return the sum of a vector's numbers."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(_sums(builder, list(args)), ir.Constant(_INDEX, 0))

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
        vector = ir.VectorType(_FLOAT, REGISTER)

        def pointer(which: int, array: Any, offset: Any, row: int, stride: Any) -> Any:
            there = builder.add(offset, builder.mul(stride, ir.Constant(stride.type, row)))
            return _pointer(context, builder, signature.args[which], array, there)

        rows = [
            _load(builder, vector, pointer(0, source, at, row, stride)) for row in range(REGISTER)
        ]
        for row, column in enumerate(_transposed(builder, rows)):
            _store(builder, column, pointer(3, target, to, row, step))
        return context.get_dummy_value()

    place = types.intp
    return types.void(source, place, place, target, place, place), generate


def _permute(builder: Any, table: Any, places: Any) -> Any:
    """Return the numbers at ``places`` of a vector of 256 numbers.

    An instruction selects them among 32, and the upper bits of a place choose one of eight results.
    """
    numbers, integers = ir.VectorType(_FLOAT, REGISTER), places.type
    kind = ir.FunctionType(numbers, [numbers, integers, numbers])
    name = "llvm.x86.avx512.vpermi2var.ps.512"
    permute = cgutils.get_or_insert_function(builder.module, kind, name)
    lanes = range(0, table.type.count, REGISTER)
    parts = [_shuffle(builder, table, table, list(range(i, i + REGISTER))) for i in lanes]
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


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Exchange the off-diagonal halves of ever larger blocks: 1 x 1, 2 x 2, 4 x 4, and so on."""
    size = 1
    while size < REGISTER:
        for row in range(REGISTER):
            if not row & size:
                upper, lower = rows[row], rows[row | size]
                lanes = range(REGISTER)
                rows[row] = _shuffle(
                    builder, upper, lower, [i - size + REGISTER if i & size else i for i in lanes]
                )
                rows[row | size] = _shuffle(
                    builder, upper, lower, [i + REGISTER if i & size else i + size for i in lanes]
                )
        size *= 2
    return rows


def _splat(builder: Any, number: Any, lanes: int) -> Any:
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(_INDEX, 0))
    return _shuffle(builder, single, undefined, [0] * lanes)


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_INDEX, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


def _fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    kind = ir.FunctionType(total.type, [total.type] * 3)
    name = f"llvm.fma.v{total.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [left, right, total])


def _first(builder: Any, number: Any, lanes: int) -> Any:
    """Return a mask of the first ``number`` lanes."""
    lane = ir.Constant(ir.VectorType(number.type, lanes), list(range(lanes)))
    return builder.icmp_signed("<", lane, _splat(builder, number, lanes))


def _pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _load(builder: Any, vector: ir.VectorType, pointer: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = 4 if vector.element == _FLOAT else 1
    return loaded


def _bytes(number: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(8), number)


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """Return the sums of 1, 2 or 4 vectors' numbers side by side.

    The halves of a vector are added, then those of the result, until one number is left. Two
    vectors share one after their first halving, so that no lanes are idle; the order is the same
    for all.
    """
    sums = 1
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors, sums = [_halved(builder, pair, sums) for pair in pairs], 2 * sums
    (summed,) = vectors
    while summed.type.count > sums:
        summed = _halved(builder, (summed,), sums)
    return summed


def _halved(builder: Any, vectors: tuple[Any, ...], sums: int) -> Any:
    """Add the upper half of the numbers that belong to a sum to their lower half.

    ``sums`` is the number of sums of which a vector has numbers. Those of the first and of the last
    vector alternate in the result.
    """
    lanes = vectors[0].type.count
    size = lanes // sums
    lower = [
        vector * lanes + index * size + lane
        for index in range(sums)
        for vector in range(len(vectors))
        for lane in range(size // 2)
    ]
    upper = [lane + size // 2 for lane in lower]
    parts = (_shuffle(builder, vectors[0], vectors[-1], half) for half in (lower, upper))
    return builder.fadd(*parts)


def _store(builder: Any, vector: Any, pointer: Any) -> None:
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a loop for the types that it is called with; numba caches it in a file."""
    loop: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return loop


def announced_compilation() -> AbstractContextManager[Any]:
    """Announce once in the context that loops are compiled, if they are not in numba's cache."""
    listener: Any = _Announcer()
    context: AbstractContextManager[Any] = event.install_listener("numba:compile", listener)
    return context


class _Announcer(event.Listener):
    """Announces the first compilation."""

    announced = False

    def on_start(self, event: Any) -> None:
        if not self.announced:
            rank_zero_info("Compiling loops for sparse weights: only the first time on a machine.")
        self.announced = True

    def on_end(self, event: Any) -> None:
        """Do nothing."""
