"""Multiplies a few tokens by unpruned values of one byte each, in integers, with AVX-512.

Inputs are rounded to eight bits, too, as dynamic quantization does: each token's by its largest
absolute value. One instruction permutes 64 inputs of a segment to the order of a row's values, and
another adds up their products (VBMI and VNNI, ``HAS_BYTES``). An integer sum has no rounding, so
the results do not depend on how many tokens or rows are multiplied together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lightning_axosparse.sparse.kernels import SEGMENT, SMALLEST, ZERO, Span, Weight
from lightning_axosparse.sparse.kernels.runs import nnz_in, segments_of
from lightning_axosparse.support import llvm
from lightning_axosparse.support.llvm import HAS_BYTES as HAS_BYTES
from lightning_axosparse.support.vectors import (
    Vector,
    compiled,
    item,
    lanes_of,
    pointer_to,
    prefetch,
)

_BYTES, _SUMS = 64, 16
"""Bytes in a register, and sums of 32 bits."""

_TOKENS = 4
"""Tokens that are multiplied together."""

_AHEAD = 4096
"""How many entries before their use values and offsets are prefetched."""


class Rounded(NamedTuple):
    """Inputs of eight bits.

    Attributes:
        inputs: for each group of tokens ``SEGMENT`` inputs of the first one, of the second one and
            so on, then the next ``SEGMENT`` of each, uint8. The last ones are filled up.
        scales: by what those of each token, minus ``ZERO``, are to be multiplied, float32.
    """

    inputs: Any
    scales: Any


class Scale(NamedTuple):
    """What turns the sums of a weight's rows into outputs.

    Attributes:
        factors: by what each sum is to be multiplied, float32.
        sums: the sum of each row's values, int32.
        bias: what is added in the end, float32; empty: nothing.
    """

    factors: Any
    sums: Any
    bias: Any


@compiled
def round_inputs(inputs: Any, width: int, rounded: Rounded) -> None:
    """Round the inputs of some tokens, a flat array of float32, to eight bits."""
    bits, scales = inputs.view(np.int32), rounded.scales
    tokens, padded = len(scales), -(-width // SEGMENT) * SEGMENT
    for token in range(tokens):
        begin, largest = token * width, np.int32(0)
        for column in range(width):  # The bits of absolute values are ordered as these are.
            largest = max(largest, bits[begin + column] & np.int32(0x7FFFFFFF))
        scales.view(np.int32)[token] = largest
        factor = (
            np.float32(127) / scales[token]
            if scales[token] > np.float32(SMALLEST)
            else np.float32(0)
        )
        scales[token] /= np.float32(127)
        group, together = _group_of(token, tokens)
        for first in range(0, width, SEGMENT):
            end = min(first + SEGMENT, width) - first
            to = group * padded + first * together + (token - group) * SEGMENT
            whole = end // _SUMS * _SUMS
            for k in range(0, whole, _SUMS):
                _round(inputs, begin + first + k, factor, rounded.inputs, to + k)
            for k in range(whole, end):
                shifted = inputs[begin + first + k] * factor + np.float32(ZERO + 0.5)
                rounded.inputs[to + k] = np.uint8(np.int32(shifted))


@compiled
def _group_of(token: int, tokens: int) -> tuple[int, int]:
    """Return the first of the tokens that a token is multiplied with, and how many they are."""
    first = token // _TOKENS * _TOKENS
    return (first, _TOKENS) if first + _TOKENS <= tokens else (token, 1)


@compiled
def spmm_t(
    rounded: Rounded, weight: Weight, rows: Span, start: int, scale: Scale, outputs: Any
) -> None:
    """Compute some numbers of ``inputs @ weight.t() + bias``.

    Args:
        rounded: the inputs.
        weight: the weight, with int8 values.
        rows: the first row to multiply by, and the one after the last.
        start: unpruned entries before them.
        scale: what the sums are multiplied by, and the bias.
        outputs: the flat array to write, float32.
    """
    token, tokens = 0, len(rounded.scales)
    while token < tokens:
        part = rounded, token, weight, rows, start, scale, outputs
        _, together = _group_of(token, tokens)
        if together == 1:
            _multiply(_zeros(1), *part)
        else:
            _multiply(_zeros(_TOKENS), *part)
        token += together


@compiled
def _multiply(
    zeros: Any,
    rounded: Rounded,
    first: int,
    weight: Weight,
    rows: Span,
    start: int,
    scale: Scale,
    outputs: Any,
) -> None:
    """Compute the numbers of as many tokens, from ``first`` on, as there are registers of zeros."""
    together = lanes_of(zeros) // _SUMS
    entry, segments, scales = start, segments_of(weight), rounded.scales
    inputs = pointer_to(rounded.inputs[first * segments * SEGMENT :])
    values, offsets = pointer_to(weight.values), pointer_to(weight.offsets)
    for row in range(rows[0], rows[1]):
        sums = zeros
        for segment in range(segments):
            place = segment * together * SEGMENT
            end = entry + nnz_in(weight, row, segment)
            while entry < end:
                prefetch(values, entry + _AHEAD)
                prefetch(offsets, entry + _AHEAD)
                sums = _add_products(sums, inputs, place, values, offsets, entry, end - entry)
                entry += _BYTES
            entry = end
        for token, total in enumerate(_totals(sums)):
            number = np.float32(np.int32(total - ZERO * item(scale.sums, row)))
            number *= item(scales, first + token) * item(scale.factors, row)
            outputs[(first + token) * weight.height + row] = (
                number + item(scale.bias, row) if len(scale.bias) else number
            )


@intrinsic
def _round(_: Any, inputs: Any, at: Any, factor: Any, rounded: Any, to: Any) -> Any:
    """Write 16 numbers, times a factor, as bytes of which ``ZERO`` is zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        inputs, at, factor, rounded, to = args
        kind = ir.VectorType(llvm.FLOAT, _SUMS)
        source = llvm.pointer(context, builder, signature.args[0], inputs, at)
        factors = llvm.splat(builder, factor, _SUMS)
        scaled = builder.fmul(llvm.load(builder, kind, source), factors)
        shifted = builder.fadd(scaled, ir.Constant(kind, [ZERO + 0.5] * _SUMS))
        whole = builder.fptosi(shifted, _TOTAL)
        target = llvm.pointer(context, builder, signature.args[3], rounded, to)
        llvm.store(builder, builder.trunc(whole, ir.VectorType(llvm.BYTE, _SUMS)), target, align=1)
        return context.get_dummy_value()

    place = types.intp
    return types.void(inputs, place, types.float32, rounded, place), generate


@intrinsic(prefer_literal=True)
def _zeros(_: Any, tokens: Any) -> Any:
    """Return a register of zeros, int32, for each of ``tokens``, a literal."""
    sums = Vector(tokens.literal_value * _SUMS, types.int32)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(sums.ir, None)

    return sums(tokens), generate


@intrinsic
def _totals(_: Any, sums: Any) -> Any:
    """Return the sum of each token's register."""
    totals = types.UniTuple(types.int32, sums.lanes // _SUMS)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        name = f"llvm.vector.reduce.add.v{_SUMS}i32"
        parts = _registers(builder, *args)
        added = [_call(builder, name, llvm.INT32, [part]) for part in parts]
        return context.make_tuple(builder, totals, added)

    return totals(sums), generate


@intrinsic
def _add_products(
    _: Any, sums: Any, inputs: Any, place: Any, values: Any, offsets: Any, entry: Any, number: Any
) -> Any:
    """Add a row's products in one segment to the sums of each token.

    Args:
        sums: a register for each token.
        inputs: the rounded inputs.
        place: where the first token's begin, in this segment.
        values: the flat array of unpruned values, int8.
        offsets: the flat array of their offsets in the segment, uint8.
        entry: the first of them.
        number: how many there are; 64 are multiplied, if there are more.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, inputs, place, values, offsets, entry, number = args

        def pointer(which: int, array: Any, offset: Any) -> Any:
            return llvm.pointer(context, builder, signature.args[which], array, offset)

        mask = _first(builder, number)
        values = _loaded(builder, pointer(3, values, entry), mask)
        offsets = _loaded(builder, pointer(4, offsets, entry), mask)
        totals = []
        for token, total in enumerate(_registers(builder, sums)):
            begin = builder.add(place, ir.Constant(place.type, token * SEGMENT))
            factors = _permuted(builder, pointer(1, inputs, begin), offsets)
            pairs = [builder.bitcast(each, _TOTAL) for each in (factors, values)]
            name = "llvm.x86.avx512.vpdpbusd.512"
            totals.append(_call(builder, name, _TOTAL, [total, *pairs]))
        return llvm.joined(builder, totals)

    place = types.intp
    return sums(sums, inputs, place, values, offsets, place, place), generate


_REGISTER, _TOTAL = ir.VectorType(llvm.BYTE, _BYTES), ir.VectorType(llvm.INT32, _SUMS)


def _first(builder: Any, number: Any) -> Any:
    """Return a mask of the first ``number`` bytes of a register, or of all, in the lowest bits."""
    most = ir.Constant(number.type, _BYTES)
    number = builder.select(builder.icmp_signed("<", number, most), number, most)
    number = llvm.splat(builder, builder.trunc(number, llvm.BYTE), _BYTES)
    chosen = builder.icmp_unsigned("<", ir.Constant(_REGISTER, list(range(_BYTES))), number)
    return builder.bitcast(chosen, ir.IntType(_BYTES))


def _loaded(builder: Any, pointer: Any, mask: Any) -> Any:
    """Load the bytes of a mask, and zeros for the others, which are not read."""
    name, zeros = "llvm.x86.avx512.mask.loadu.b.512", ir.Constant(_REGISTER, None)
    pointer = builder.bitcast(pointer, llvm.BYTE.as_pointer())
    return _call(builder, name, _REGISTER, [pointer, zeros, mask])


def _permuted(builder: Any, segment: Any, offsets: Any) -> Any:
    """Return the bytes at ``offsets`` of a segment: two instructions select them among 128 each."""
    parts = []
    for first in range(0, SEGMENT, _BYTES):
        place = builder.gep(segment, [ir.Constant(ir.IntType(64), first)])
        parts.append(llvm.load(builder, _REGISTER, place))
    low, high = (
        _call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _REGISTER, [lower, offsets, upper])
        for lower, upper in (parts[:2], parts[2:])
    )
    return builder.select(
        builder.icmp_signed("<", offsets, ir.Constant(_REGISTER, None)), high, low
    )


def _registers(builder: Any, sums: Any) -> list[Any]:
    """Return the register of each token."""
    firsts = range(0, sums.type.count, _SUMS)
    return [llvm.shuffle(builder, sums, sums, list(range(i, i + _SUMS))) for i in firsts]


def _call(builder: Any, name: str, result: Any, operands: list[Any]) -> Any:
    """Call a function of LLVM, such as one that is an instruction of the processor."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), operands)
