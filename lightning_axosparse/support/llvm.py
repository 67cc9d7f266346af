"""Generates LLVM code for vectors, of which the functions of ``vectors.py`` consist."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

FLOAT = ir.FloatType()
INT32 = ir.IntType(32)
INT16 = ir.IntType(16)
BYTE = ir.IntType(8)

_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")

HAS_AVX512 = "+avx512f" in _FEATURES
"""Whether this processor's vector instructions are those of AVX-512."""

HAS_BFLOAT16 = "+avx512bf16" in _FEATURES
"""Whether they multiply bfloat16, too."""

HAS_BYTES = "+avx512vbmi" in _FEATURES and "+avx512vnni" in _FEATURES
"""Whether they permute bytes, and multiply them."""

REGISTER = 16 if HAS_AVX512 else 8
"""float32 numbers in a vector register of this processor, or fewer."""

PAIRS = 2 * REGISTER
"""bfloat16 numbers in a register."""


def load(builder: Any, vector: ir.VectorType, pointer: Any) -> Any:
    """Load a vector of a type, which need not be aligned."""
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = 4 if vector.element == FLOAT else 1
    return loaded


def load_factors(builder: Any, vector: ir.VectorType, kind: Any, pointer: Any) -> Any:
    """Load a vector of float32 from an array of a type: of float32, or of int8 to be converted."""
    if kind.dtype != types.int8:
        return load(builder, vector, pointer)
    return builder.sitofp(load(builder, ir.VectorType(BYTE, vector.count), pointer), vector)


def store(builder: Any, vector: Any, pointer: Any, align: int = 4) -> None:
    """Store a vector at an address that is a multiple of ``align`` bytes."""
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=align)


def pointer(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """Return where the entry at an offset of an array, or from a pointer, lies."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, array).data
    return builder.gep(array, [offset])


def row_pointer(
    context: Any, builder: Any, kind: Any, array: Any, offset: Any, row: int, stride: Any
) -> Any:
    """Return where a row of a block lies that begins at an offset of an array."""
    there = builder.add(offset, builder.mul(stride, ir.Constant(stride.type, row)))
    return pointer(context, builder, kind, array, there)


def splat(builder: Any, number: Any, lanes: int) -> Any:
    """Return a vector whose lanes are all the same number."""
    undefined = ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined)
    single = builder.insert_element(undefined, number, ir.Constant(INT32, 0))
    return shuffle(builder, single, undefined, [0] * lanes)


def shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    """Return some lanes of two vectors, those of the second counted after the first."""
    mask = ir.Constant(ir.VectorType(INT32, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


def joined(builder: Any, parts: list[Any]) -> Any:
    """Return the numbers of 1, 2, 4 or more vectors as one."""
    while len(parts) > 1:
        lanes = list(range(2 * parts[0].type.count))
        parts = [
            shuffle(builder, *pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def fma(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Return ``left * right + total``, rounded once."""
    kind = ir.FunctionType(total.type, [total.type] * 3)
    name = f"llvm.fma.v{total.type.count}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [left, right, total])


def exponential(builder: Any, power: Any) -> Any:
    """Return e to the power of each number, which is at most 88; zero below -87.

    The power of 2 of the nearest integer is the exponent's bits, and the rest a polynomial: the
    coefficients are those of Cephes' ``expf`` (Moshier).
    """
    kind, integers = power.type, ir.VectorType(INT32, power.type.count)

    def constant(number: float) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    nearest = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind]), f"llvm.rint.v{kind.count}f32"
    )
    whole = builder.call(nearest, [builder.fmul(power, constant(1.44269504088896341))])
    rest = fma(builder, whole, constant(-0.693359375), power)
    rest = fma(builder, whole, constant(2.12194440e-4), rest)
    result = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        result = fma(builder, result, rest, constant(coefficient))
    result = fma(builder, builder.fmul(result, rest), rest, builder.fadd(rest, constant(1.0)))
    bits = builder.shl(builder.fptosi(whole, integers), ir.Constant(integers, [23] * kind.count))
    result = builder.bitcast(builder.add(builder.bitcast(result, integers), bits), kind)
    return builder.select(builder.fcmp_ordered("<", power, constant(-87.0)), constant(0.0), result)


def add_pairs(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Add the products of consecutive pairs of bfloat16 to each of 16 numbers, with AVX-512."""
    halves = ir.VectorType(_BFloat(), PAIRS)
    kind = ir.FunctionType(total.type, [total.type, halves, halves])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    factors = (builder.bitcast(vector, halves) for vector in (left, right))
    return builder.call(function, [total, *factors])


class _BFloat(ir.Type):
    """The type bfloat, which llvmlite does not define."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def sums_of(builder: Any, vectors: list[Any]) -> Any:
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
    parts = (shuffle(builder, vectors[0], vectors[-1], half) for half in (lower, upper))
    return builder.fadd(*parts)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Exchange the off-diagonal halves of ever larger blocks: 1 x 1, 2 x 2, 4 x 4, and so on."""
    size = 1
    while size < REGISTER:
        for row in range(REGISTER):
            if not row & size:
                upper, lower = rows[row], rows[row | size]
                lanes = range(REGISTER)
                rows[row] = shuffle(
                    builder, upper, lower, [i - size + REGISTER if i & size else i for i in lanes]
                )
                rows[row | size] = shuffle(
                    builder, upper, lower, [i + REGISTER if i & size else i + size for i in lanes]
                )
        size *= 2
    return rows
