"""Densifies and compresses a tile with Triton, in one pass over the dense entries.

One program works on one block of the layout. To densify, it writes every entry of the block once,
coalesced: the value or zero, according to the bit. The tests compare the kernels with the
reference in Triton's interpreter and compile them for a GPU; ``benchmarks/gpu/kernels.py`` compares
and times them on one.

Besides memory, the number of instructions per entry limits their speed, so arithmetic on entries
has 32 bits and counts from the start of the block; the start itself has 64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 2048
"""Entries that a program handles at a time."""


def densify(
    bits: Tensor, starts: Tensor, first: int, blocks: int, block: int, values: Tensor, out: Tensor
) -> None:
    """Fill the flat tile ``out`` with ``values`` at the unpruned entries, and zeros.

    Args:
        bits: one for each entry of the tile, uint8, the first in the lowest bit.
        starts: unpruned entries of the whole tensor before each block and after the last one.
        first: unpruned entries of the whole tensor before the tile.
        blocks: how many the tile has; one program runs on each.
        block: entries of a block, pruned or not.
        values: the unpruned values, of any dtype.
        out: the tile, of any dtype.
    """
    _densify_bits[(blocks,)](values, out, starts, first, out.numel(), bits, block, CHUNK=_CHUNK)


def compress(
    bits: Tensor, starts: Tensor, first: int, blocks: int, block: int, dense: Tensor, out: Tensor
) -> None:
    """Copy the unpruned entries of the flat tile ``dense`` to ``out``; arguments as above."""
    _compress_bits[(blocks,)](out, dense, starts, first, dense.numel(), bits, block, CHUNK=_CHUNK)


@triton.jit
def _densify_bits(values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    entry = tl.load(starts + program).to(tl.int64) - first
    within = 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for begin in range(start, end, CHUNK):
        left = tl.minimum(end - begin, CHUNK).to(tl.int32)
        unpruned, ranks, count = _ranked(bits + begin // 8, left, CHUNK)
        filled = tl.load(values + entry + ranks, mask=unpruned, other=0)
        tl.store(dense + begin + within, filled, mask=within < left)
        entry += count


@triton.jit
def _compress_bits(values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    entry = tl.load(starts + program).to(tl.int64) - first
    within = 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for begin in range(start, end, CHUNK):
        left = tl.minimum(end - begin, CHUNK).to(tl.int32)
        unpruned, ranks, count = _ranked(bits + begin // 8, left, CHUNK)
        # Load every entry, in wide loads: pruned and unpruned ones share memory sectors.
        loaded = tl.load(dense + begin + within, mask=within < left)
        tl.store(values + entry + ranks, loaded, mask=unpruned)
        entry += count


@triton.jit
def _ranked(bits, left, CHUNK: tl.constexpr):
    """Return which of the next ``left`` entries are unpruned, how many before each, and in all.

    The first two have the shape (CHUNK / 8, 8): the eight entries of a byte belong to one thread.
    """
    byte = tl.arange(0, CHUNK // 8)
    packed = tl.load(bits + byte, mask=8 * byte < left, other=0).to(tl.uint32)
    # Spread the eight bits to four bits each; the product adds up each bit and those below it.
    spread = (packed | (packed << 12)) & 0x000F000F
    spread = (spread | (spread << 6)) & 0x03030303
    spread = (spread | (spread << 3)) & 0x11111111
    sums = spread * 0x11111111
    counts = (sums >> 28).to(tl.int32)
    before = tl.cumsum(counts, 0) - counts
    place = tl.arange(0, 8).to(tl.uint32)[None, :]
    unpruned = ((packed[:, None] >> place) & 1) == 1
    within = (((sums << 4)[:, None] >> (4 * place)) & 15).to(tl.int32)
    return unpruned, before[:, None] + within, tl.sum(counts, 0)
