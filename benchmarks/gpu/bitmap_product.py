"""Multiplies by a sparse weight that is loaded sparse and made dense in registers.

With few tokens a product takes as long as reading the weight does. So a program reads a piece of
the bitmap and its kept values, puts zeros between them in registers, and multiplies the piece on
tensor cores as a dense one: load as sparse, compute as dense (Flash-LLM: Xia et al., VLDB 2023;
SpInfer: Fan et al., EuroSys 2025). No dense weight is written to memory.

The index is the package's own. It counts kept entries by block; a program that starts inside a
block counts the bits before its first entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_axosparse.sparse.store.formats import BitmapLayout
from lightning_axosparse.sparse.store.layout import block_rows


class Cut(NamedTuple):
    """How a product is cut into programs.

    Attributes:
        rows: rows of the weight that a program multiplies: a power of two, at least 16.
        columns: columns that it multiplies at a time: a power of two, at least 32.
        parts: programs that share the columns of the same rows; their results are added.
        warps: warps of a program.
    """

    rows: int
    columns: int
    parts: int
    warps: int = 4


def spmm_t(inputs: Tensor, values: Tensor, layout: BitmapLayout, cut: Cut) -> Tensor:
    """Multiply ``inputs`` by the transposed weight, with sums in float32.

    Args:
        inputs: shape ``(tokens, columns)``, contiguous, float16 or bfloat16.
        values: kept values of the weight, which has the shape ``(rows, columns)``; same dtype.
        layout: the kept entries.
        cut: how to cut the product into programs.

    Returns:
        A tensor of shape ``(tokens, rows)``.

    Raises:
        ValueError: if the columns are not a multiple of 32, the bits of a word.
    """
    tokens, (rows, columns) = inputs.shape[0], layout.shape
    if columns % 32:
        raise ValueError(f"The weight has {columns} columns; the kernel needs a multiple of 32.")
    share = triton.cdiv(triton.cdiv(columns, cut.parts), cut.columns) * cut.columns
    parts = triton.cdiv(columns, share)
    dtype = inputs.dtype if parts == 1 else torch.float32
    results = inputs.new_empty(parts, tokens, rows, dtype=dtype)
    _times_transposed[triton.cdiv(rows, cut.rows), parts](
        values,
        layout.bits,
        layout.starts,
        inputs,
        results,
        rows,
        columns,
        tokens,
        block_rows(layout.shape),
        share,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        TOKENS=max(16, triton.next_power_of_2(tokens)),
        num_warps=cut.warps,
    )
    return results[0] if parts == 1 else results.sum(0).to(inputs.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _times_transposed(  # type: ignore[no-untyped-def]
    values,
    bits,
    starts,
    inputs,
    results,
    rows,
    columns,
    tokens,
    block_rows,
    share,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Multiply the columns of one part, in some rows of the weight, by all tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, columns)

    block = row // block_rows
    block_bits = bits + block.to(tl.int64) * (block_rows * columns // 8)
    before = tl.where(inside, (row - block * block_rows) * columns + first, 0)
    entry = tl.load(starts + block, mask=inside, other=0).to(tl.int64)
    for at in range(0, (block_rows - 1) * columns + first, 1024):
        entry += _kept(block_bits + at // 8, before - at, 1024)

    row_bits = bits + row.to(tl.int64) * (columns // 8)
    byte, column = tl.arange(0, COLUMNS // 8)[None, :], tl.arange(0, COLUMNS)[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    product = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in range(first, last, COLUMNS):
        left = last - at
        read = inside[:, None] & (8 * byte < left)
        held = tl.load(row_bits[:, None] + (at // 8 + byte), mask=read, other=0).to(tl.uint32)
        counted = _counted(held)
        counts = (counted >> 28).to(tl.int32)
        start = values + entry[:, None] + (tl.cumsum(counts, 1) - counts)
        weight = tl.reshape(_entries(start, held, counted << 4, 0, 1), (ROWS, COLUMNS))
        read = (token < tokens) & (column < left)
        factor = tl.load(inputs + (token * columns + at + column), mask=read, other=0)
        product = tl.dot(weight, factor, product)
        entry += tl.sum(counts, 1)

    place = (tl.program_id(1) * tokens + token) * rows + row[:, None]
    tl.store(results + place, product, mask=inside[:, None] & (token < tokens))


@triton.jit  # type: ignore[untyped-decorator]
def _kept(bits, left, ENTRIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return how many of the next ``left`` entries of each row, but at most ENTRIES, are kept."""
    word = tl.arange(0, ENTRIES // 32)[None, :]
    words = bits.to(tl.pointer_type(tl.uint32))[:, None] + word
    held = tl.load(words, mask=32 * word < left[:, None], other=0)
    # The compiler makes one instruction of this.
    held -= (held >> 1) & 0x55555555
    held = (held & 0x33333333) + ((held >> 2) & 0x33333333)
    held = (((held + (held >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24
    return tl.sum(held.to(tl.int32), 1)


@triton.jit
def _counted(held):  # type: ignore[no-untyped-def]
    """Return, in four bits for each bit of a byte, how many are set among it and those below."""
    spread = (held | (held << 12)) & 0x000F000F
    spread = (spread | (spread << 6)) & 0x03030303
    spread = (spread | (spread << 3)) & 0x11111111
    return spread * 0x11111111


@triton.jit  # type: ignore[untyped-decorator]
def _entries(  # type: ignore[no-untyped-def]
    start, held, before, PLACE: tl.constexpr, STEP: tl.constexpr
):
    """Return the entries PLACE, PLACE + STEP, ... of every byte, zeros where none is kept.

    The shape is that of ``held`` and a dimension of two for each halving of the eight entries:
    those of a byte belong to one thread.
    """
    if STEP == 8:
        kept = (held & (1 << PLACE)) != 0
        made = tl.load(start + ((before >> (4 * PLACE)) & 15).to(tl.int32), mask=kept, other=0)
    else:
        made = tl.join(
            _entries(start, held, before, PLACE, 2 * STEP),
            _entries(start, held, before, PLACE + STEP, 2 * STEP),
        )
    return made
