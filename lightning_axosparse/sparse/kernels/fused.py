"""Fused kernels: densify and compress in Triton, each in one pass over the dense tile.

A program has one block of the layout. To make it dense it writes every entry of the block once,
coalesced: with a bitmap, kept entry or zero by the bit; in the other formats zeros and then, while
the block is still in cache, the kept entries over them. Tested in Triton's interpreter against the
reference; they have not run on a GPU.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightning_axosparse.sparse.formats import BitmapLayout, BlockLayout, CooLayout, GapLayout
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.sparse.layout import Layout, Tile, block_entries

_CHUNK = 1024

# What a stored index counts from: the tensor's start, the block's, or the kept entry before.
_FROM_START, _FROM_BLOCK, _FROM_LAST = (tl.constexpr(i) for i in range(3))


def densify(layout: Layout, tile: Tile, values: Tensor, out: Tensor) -> None:
    """As :func:`lightning_axosparse.sparse.kernels.densify`."""
    if isinstance(layout, BitmapLayout):
        _run(_densify_bits, tile, layout, values, out, layout.bits[tile.start // 8 :])
    elif (places := _places(layout, tile)) is None:
        reference.densify(layout, tile, values, out)
    else:
        _run(_densify_indices, tile, layout, values, out, *places)


def compress(layout: Layout, tile: Tile, dense: Tensor, out: Tensor) -> None:
    """As :func:`lightning_axosparse.sparse.kernels.compress`."""
    if isinstance(layout, BitmapLayout):
        _run(_compress_bits, tile, layout, out, dense, layout.bits[tile.start // 8 :])
    elif (places := _places(layout, tile)) is None:
        reference.compress(layout, tile, dense, out)
    else:
        _run(_compress_indices, tile, layout, out, dense, *places)


def _places(layout: Layout, tile: Tile) -> tuple[Tensor, Tensor, int, tl.constexpr] | None:
    """Indices, what they count from (before each block, of the tensor), and how; None: no kernel.

    Distances of 256 and more, of which there are few, are left to the reference.
    """
    none = layout.starts
    if isinstance(layout, CooLayout):
        return layout.indices[tile.entries], none, tile.start, _FROM_START
    if isinstance(layout, BlockLayout):
        return layout.local[tile.entries], none, 0, _FROM_BLOCK
    if isinstance(layout, GapLayout) and layout.jumps.numel() == 0:
        before = layout.before[tile.blocks]
        return layout.gaps[tile.entries], before, tile.start, _FROM_LAST
    return None


def _run(
    kernel: Any, tile: Tile, layout: Layout, values: Tensor, dense: Tensor, *places: Any
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
        CHUNK=_CHUNK,
    )


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
    for skipped in range(0, block, CHUNK):
        places = start + skipped + tl.arange(0, CHUNK)
        zeros = tl.zeros((CHUNK,), dense.dtype.element_ty)
        tl.store(dense + places, zeros, mask=(places < start + block) & (places < numel))
    tl.debug_barrier()
    entry = tl.load(starts + program).to(tl.int64) - first
    end = tl.load(starts + program + 1).to(tl.int64) - first
    last = _counted_from(before, program, start, offset, how)
    while entry < end:
        entries = entry + tl.arange(0, CHUNK)
        mask = entries < end
        index = tl.load(indices + entries, mask=mask, other=0).to(tl.int64)
        places, last = _following(index, last, how)
        tl.store(dense + places, tl.load(values + entries, mask=mask), mask=mask)
        entry += CHUNK


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
    entry = tl.load(starts + program).to(tl.int64) - first
    end = tl.load(starts + program + 1).to(tl.int64) - first
    last = _counted_from(before, program, program * block, offset, how)
    while entry < end:
        entries = entry + tl.arange(0, CHUNK)
        mask = entries < end
        index = tl.load(indices + entries, mask=mask, other=0).to(tl.int64)
        places, last = _following(index, last, how)
        tl.store(values + entries, tl.load(dense + places, mask=mask), mask=mask)
        entry += CHUNK


@triton.jit  # type: ignore[untyped-decorator]
def _counted_from(before, program, start, offset, how: tl.constexpr):  # type: ignore[no-untyped-def]
    """The place, in the tile, from which the block's first index counts."""
    place = start
    if how == _FROM_LAST:
        place = tl.load(before + program).to(tl.int64) - offset
    elif how == _FROM_START:
        place = start * 0 - offset
    return place


@triton.jit  # type: ignore[untyped-decorator]
def _following(index, last, how: tl.constexpr):  # type: ignore[no-untyped-def]
    """Places of a chunk of kept entries, and from where the next chunk counts."""
    places = last + index
    if how == _FROM_LAST:
        places = last + tl.cumsum(index, 0)
        last += tl.sum(index, 0)
    return places, last


@triton.jit  # type: ignore[untyped-decorator]
def _densify_bits(  # type: ignore[no-untyped-def]
    values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr
):
    """To each place of the block: the next kept entry if its bit is set, zero if not."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    entry = tl.load(starts + program).to(tl.int64) - first
    for skipped in range(0, block, CHUNK):
        places = start + skipped + tl.arange(0, CHUNK)
        inside = (places < start + block) & (places < numel)
        bit = (tl.load(bits + places // 8, mask=inside, other=0).to(tl.int64) >> (places % 8)) & 1
        entries = entry + tl.cumsum(bit, 0) - bit
        kept = tl.load(values + entries, mask=bit == 1, other=0)
        tl.store(dense + places, kept, mask=inside)
        entry += tl.sum(bit, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _compress_bits(  # type: ignore[no-untyped-def]
    values, dense, starts, first, numel, bits, block, CHUNK: tl.constexpr
):
    """From each place of the block whose bit is set: the next kept entry."""
    program = tl.program_id(0).to(tl.int64)
    start = program * block
    entry = tl.load(starts + program).to(tl.int64) - first
    for skipped in range(0, block, CHUNK):
        places = start + skipped + tl.arange(0, CHUNK)
        inside = (places < start + block) & (places < numel)
        bit = (tl.load(bits + places // 8, mask=inside, other=0).to(tl.int64) >> (places % 8)) & 1
        entries = entry + tl.cumsum(bit, 0) - bit
        tl.store(values + entries, tl.load(dense + places, mask=bit == 1), mask=bit == 1)
        entry += tl.sum(bit, 0)
