"""Fused kernels: densify and compress in Triton, each in one pass over the dense tile.

A program has one block of the layout. To make it dense it writes every entry of the block once,
coalesced: with a bitmap, kept entry or zero by the bit; in the other formats zeros and then, while
the block is still in cache, the kept entries over them. Tested in Triton's interpreter against the
reference, and compiled for a GPU; they have not run on one.

What bounds them there, beside memory, is the number of instructions an entry, so arithmetic on
entries has 32 bits and counts from the block's start; the start itself has 64.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_axosparse.sparse.formats import BitmapLayout, BlockLayout, CooLayout, GapLayout
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import INT32_ENTRIES, Layout, Tile, block_entries

_PLACES, _KEPT = 2048, 1024
"""Places of a bitmap, and kept entries with an index, that a program works on at a time."""

# What a stored index counts from: the tensor's start, the block's, or the kept entry before.
_FROM_START, _FROM_BLOCK, _FROM_LAST = (tl.constexpr(i) for i in range(3))


def densify(layout: Layout, tile: Tile, values: Tensor, out: Tensor) -> None:
    """As :func:`lightning_axosparse.sparse.kernels.densify`."""
    places = _places(layout, tile)
    if places is None:
        reference.densify(layout, tile, values, out)
    else:
        bitmap = len(places) == 1
        kernel, chunk = (_densify_bits, _PLACES) if bitmap else (_densify_indices, _KEPT)
        _run(kernel, chunk, tile, layout, values, out, *places)


def compress(layout: Layout, tile: Tile, dense: Tensor, out: Tensor) -> None:
    """As :func:`lightning_axosparse.sparse.kernels.compress`."""
    places = _places(layout, tile)
    if places is None:
        reference.compress(layout, tile, dense, out)
    else:
        bitmap = len(places) == 1
        kernel, chunk = (_compress_bits, _PLACES) if bitmap else (_compress_indices, _KEPT)
        _run(kernel, chunk, tile, layout, out, dense, *places)


def _places(layout: Layout, tile: Tile) -> tuple[Any, ...] | None:
    """Where entries are kept, as a kernel takes it; None: no kernel.

    Bits; or indices, what they count from (before each block, of the tensor), and how. Distances of
    256 and more, of which there are few, and rows of 2^31 entries are left to the reference.
    """
    none = layout.starts
    if block_entries(layout.shape) >= INT32_ENTRIES:
        return None
    if isinstance(layout, BitmapLayout):
        return (layout.bits[tile.start // 8 :],)
    if isinstance(layout, CooLayout):
        return layout.indices[tile.entries], none, tile.start, _FROM_START
    if isinstance(layout, BlockLayout):
        return layout.local[tile.entries], none, 0, _FROM_BLOCK
    if isinstance(layout, GapLayout) and layout.jumps.numel() == 0:
        before = layout.before[tile.blocks]
        return layout.gaps[tile.entries], before, tile.start, _FROM_LAST
    return None


def _run(
    kernel: Any, chunk: int, tile: Tile, layout: Layout, values: Tensor, dense: Tensor, *places: Any
) -> None:
    programs = tile.blocks.stop - tile.blocks.start
    kernel[(programs,)](
        values,
        dense,
        layout.starts[tile.blocks.start :],
        tile.entries.start,
        tile.numel,
        *places,
        block_entries(layout.shape),
        CHUNK=chunk,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _densify_bits(  # type: ignore[no-untyped-def]
    values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr
):
    """To each place of the block: the next kept entry if its bit is set, zero if not."""
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


@triton.jit  # type: ignore[untyped-decorator]
def _compress_bits(  # type: ignore[no-untyped-def]
    values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr
):
    """From each place of the block whose bit is set: the next kept entry."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    end = tl.minimum(start + block, numel)
    entry = tl.load(starts + program).to(tl.int64) - first
    within = 8 * tl.arange(0, CHUNK // 8)[:, None] + tl.arange(0, 8)[None, :]
    for begin in range(start, end, CHUNK):
        left = tl.minimum(end - begin, CHUNK).to(tl.int32)
        kept, ranks, count = _ranked(bits + begin // 8, left, CHUNK)
        # All of them, in wide loads: those that are kept lie in the same sectors.
        found = tl.load(dense + begin + within, mask=within < left)
        tl.store(values + entry + ranks, found, mask=kept)
        entry += count


@triton.jit  # type: ignore[untyped-decorator]
def _ranked(bits, left, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of the next ``left`` places are kept, how many are before each, and in all.

    The first two have the shape (CHUNK / 8, 8): a byte's eight places in a row, for one thread.
    """
    byte = tl.arange(0, CHUNK // 8)
    held = tl.load(bits + byte, mask=8 * byte < left, other=0).to(tl.uint32)
    # The eight bits to the lowest of four bits each; the product adds up those below and itself.
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


@triton.jit  # type: ignore[untyped-decorator]
def _densify_indices(  # type: ignore[no-untyped-def]
    values,
    dense,
    starts,
    first,
    numel,
    indices,
    before,
    offset,
    how: tl.constexpr,
    block,
    CHUNK: tl.constexpr,
):
    """Zeros to the block, then its kept entries to their places."""
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
    last = _counted_from(before, program, start, offset, how)
    for begin in range(entry, stop, CHUNK):
        places, last, mask = _following(indices + begin, stop - begin, last, how, CHUNK)
        kept = tl.load(values + begin + tl.arange(0, CHUNK), mask=mask)
        tl.store(dense + start + places, kept, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _compress_indices(  # type: ignore[no-untyped-def]
    values,
    dense,
    starts,
    first,
    numel,
    indices,
    before,
    offset,
    how: tl.constexpr,
    block,
    CHUNK: tl.constexpr,
):
    """The block's kept entries from their places."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    entry = tl.load(starts + program).to(tl.int64) - first
    stop = tl.load(starts + program + 1).to(tl.int64) - first
    last = _counted_from(before, program, start, offset, how)
    for begin in range(entry, stop, CHUNK):
        places, last, mask = _following(indices + begin, stop - begin, last, how, CHUNK)
        kept = tl.load(dense + start + places, mask=mask)
        tl.store(values + begin + tl.arange(0, CHUNK), kept, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _counted_from(before, program, start, offset, how: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place, in the block, from which its first index counts."""
    place = start * 0
    if how == _FROM_LAST:
        place = tl.load(before + program).to(tl.int64) - offset - start
    elif how == _FROM_START:
        place = -offset - start
    return place


@triton.jit  # type: ignore[untyped-decorator]
def _following(indices, left, last, how: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places in the block of the next kept entries, from where those after count, and a mask."""
    entries = tl.arange(0, CHUNK)
    mask = entries < left
    index = tl.load(indices + entries, mask=mask, other=0)
    if how == _FROM_LAST:
        index = tl.cumsum(index.to(tl.int32), 0)
        places = last.to(tl.int32) + index
        last += tl.max(index, 0)
    else:
        places = (last + index).to(tl.int32)
    return places, last, mask
