"""Densifies and compresses a tile with Triton, in one pass over the dense entries.

One program works on one block of the layout. To densify, it writes every entry of the block once,
coalesced: from a bitmap it writes the kept value or zero according to the bit; from positions it
writes zeros and then, while the block is still in cache, the kept values over them. The
tests compare the kernels with the reference in Triton's interpreter and compile them for a GPU;
they have not run on one.

Besides memory, the number of instructions per entry limits their speed, so arithmetic on entries
has 32 bits and counts from the start of the block; the start itself has 64.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_axosparse.sparse.kernels import Bits, Blocks, Positions

_PLACES, _KEPT = 2048, 1024
"""Entries of a bitmap, and kept entries with an index, that a program handles at a time."""


def densify(index: Bits | Positions, blocks: Blocks, values: Tensor, out: Tensor) -> None:
    """Fill the flat tile ``out`` with ``values`` where an entry is kept and zeros elsewhere."""
    kernel = _densify_bits if isinstance(index, Bits) else _densify_indices
    _launch(kernel, index, blocks, values, out)


def compress(index: Bits | Positions, blocks: Blocks, dense: Tensor, out: Tensor) -> None:
    """Copy the kept entries of the flat tile ``dense`` to ``out``."""
    kernel = _compress_bits if isinstance(index, Bits) else _compress_indices
    _launch(kernel, index, blocks, out, dense)


def _launch(
    kernel: Any, index: Bits | Positions, blocks: Blocks, values: Tensor, dense: Tensor
) -> None:
    arguments: tuple[Any, ...] = ()
    match index:
        case Bits(bits):
            arguments = (bits,)
        case Positions(indices, tile_start):
            arguments = (indices, tile_start)
    kernel[(blocks.number,)](
        values,
        dense,
        blocks.starts,
        blocks.first,
        dense.numel(),
        *arguments,
        blocks.entries,
        CHUNK=_PLACES if isinstance(index, Bits) else _KEPT,
    )


@triton.jit
def _densify_bits(values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr):
    """Write to each entry of the block the next kept value if its bit is set, else zero."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    entry = tl.load(starts + program).to(tl.int64) - first
    within = 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for begin in range(start, end, CHUNK):
        left = tl.minimum(end - begin, CHUNK).to(tl.int32)
        kept, ranks, count = _ranked(bits + begin // 8, left, CHUNK)
        made = tl.load(values + entry + ranks, mask=kept, other=0)
        tl.store(dense + begin + within, made, mask=within < left)
        entry += count


@triton.jit
def _compress_bits(values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr):
    """Read the entries of the block whose bits are set."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    entry = tl.load(starts + program).to(tl.int64) - first
    within = 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for begin in range(start, end, CHUNK):
        left = tl.minimum(end - begin, CHUNK).to(tl.int32)
        kept, ranks, count = _ranked(bits + begin // 8, left, CHUNK)
        # Load every entry, in wide loads: kept and pruned ones lie in the same memory sectors.
        found = tl.load(dense + begin + within, mask=within < left)
        tl.store(values + entry + ranks, found, mask=kept)
        entry += count


@triton.jit
def _ranked(bits, left, CHUNK: tl.constexpr):
    """Return which of the next ``left`` entries are kept, the kept ones before each, and all.

    The first two have the shape (CHUNK / 8, 8): the eight entries of a byte belong to one thread.
    """
    byte = tl.arange(0, CHUNK // 8)
    held = tl.load(bits + byte, mask=8 * byte < left, other=0).to(tl.uint32)
    # Spread the eight bits to four bits each; the product adds up each bit and those below it.
    spread = (held | (held << 12)) & 0x000F000F
    spread = (spread | (spread << 6)) & 0x03030303
    spread = (spread | (spread << 3)) & 0x11111111
    sums = spread * 0x11111111
    counts = (sums >> 28).to(tl.int32)
    before = tl.cumsum(counts, 0) - counts
    place = tl.arange(0, 8).to(tl.uint32)[None, :]
    kept = ((held[:, None] >> place) & 1) == 1
    within = (((sums << 4)[:, None] >> (4 * place)) & 15).to(tl.int32)
    return kept, before[:, None] + within, tl.sum(counts, 0)


@triton.jit
def _densify_indices(
    values,
    dense,
    starts,
    first,
    numel,
    indices,
    tile_start,
    block,
    CHUNK: tl.constexpr,
):
    """Write zeros to the block, then the kept values to their positions."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    for begin in range(start, end, CHUNK):
        within = tl.arange(0, CHUNK)
        zeros = tl.zeros((CHUNK,), dense.dtype.element_ty)
        tl.store(dense + begin + within, zeros, mask=within < end - begin)
    tl.debug_barrier()
    entry = tl.load(starts + program).to(tl.int64) - first
    stop = tl.load(starts + program + 1).to(tl.int64) - first
    for begin in range(entry, stop, CHUNK):
        mask = tl.arange(0, CHUNK) < stop - begin
        places = _places(indices + begin, mask, tile_start + start, CHUNK)
        kept = tl.load(values + begin + tl.arange(0, CHUNK), mask=mask)
        tl.store(dense + start + places, kept, mask=mask)


@triton.jit
def _compress_indices(
    values,
    dense,
    starts,
    first,
    numel,
    indices,
    tile_start,
    block,
    CHUNK: tl.constexpr,
):
    """Read the kept entries of the block from their positions."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    entry = tl.load(starts + program).to(tl.int64) - first
    stop = tl.load(starts + program + 1).to(tl.int64) - first
    for begin in range(entry, stop, CHUNK):
        mask = tl.arange(0, CHUNK) < stop - begin
        places = _places(indices + begin, mask, tile_start + start, CHUNK)
        kept = tl.load(dense + start + places, mask=mask)
        tl.store(values + begin + tl.arange(0, CHUNK), kept, mask=mask)


@triton.jit
def _places(indices, mask, start, CHUNK: tl.constexpr):
    """Return the next kept entries' positions in the block that begins at ``start``."""
    return (tl.load(indices + tl.arange(0, CHUNK), mask=mask, other=0) - start).to(tl.int32)
