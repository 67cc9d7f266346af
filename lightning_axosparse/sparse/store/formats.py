"""Stores the positions of unpruned entries in one of two index formats.

========  =====================================  ============================================
format    bytes per unpruned entry               where it pays
          at 50 / 80 / 90 / 95 % pruned
========  =====================================  ============================================
segments  1.02 / 1.04 / 1.09 / 1.18              the default on CPU: compiled code multiplies
                                                 with the values as they are stored
bitmap    0.25 / 0.63 / 1.26 / 2.52              the default on CUDA, where a kernel reads it
                                                 in one pass
========  =====================================  ============================================

``benchmarks/overhead`` measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.kernels import SEGMENT, kernel_module, triton_installed
from lightning_axosparse.sparse.store.layout import (
    INT32_ENTRIES,
    SHORTEST_LINE,
    Layout,
    Tile,
    block_entries,
    block_rows,
    index_dtype,
    is_stack,
    row_length,
)


@dataclass(eq=False)
class SegmentLayout(Layout):
    """One byte per unpruned entry: its offset in a segment of a row; two per segment: their number.

    A segment has ``SEGMENT`` entries, the last one of a row has the rest. Rows of fewer than
    ``SHORTEST_LINE`` entries are indexed a block at a time, as if a block were one long row.

    Attributes:
        counts: unpruned entries in each segment, int16.
        offsets: the offset of each unpruned entry in its segment, shape ``(nnz,)``, uint8.
    """

    counts: Tensor
    offsets: Tensor

    @staticmethod
    def _index(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        line = _line_entries(mask.shape)
        segments, lines = _segments(line), -(-mask.numel() // line)
        within = positions % line
        numbers = positions // line * segments + within // SEGMENT
        return {
            "counts": torch.bincount(numbers, minlength=lines * segments).short(),
            "offsets": (within % SEGMENT).to(torch.uint8),
        }

    @cached_property
    def has_row_segments(self) -> bool:
        """Whether each row has segments of its own, as products with unpruned values need."""
        return _line_entries(self.shape) == row_length(self.shape)

    @cached_property
    def read_by_loops(self) -> tuple[Any, Any, int, int]:
        """The index of a matrix on CPU as arrays, its rows and its columns.

        Built for each product, the arrays took a twentieth of one token's time, 1024 wide.
        """
        sizes = self.shape[0], row_length(self.shape)
        return self.counts.numpy(), self.offsets.numpy(), *sizes

    def positions(self) -> Tensor:
        """Return the start of each unpruned entry's segment plus its offset."""
        return self._positions(self.counts, self.offsets)

    def positions_in(self, tile: Tile) -> Tensor:
        """Return the positions in the segments of the tile."""
        return self._positions(self.counts[self._segments_in(tile)], self.offsets[tile.entries])

    def kernels(self, tensor: Tensor) -> ModuleType | None:
        """Return compiled loops on a CPU."""
        return kernel_module("segments") if tensor.is_cpu else None

    def _index_in(self, tile: Tile) -> tuple[Tensor, Tensor, int]:
        """Return the tile's segments."""
        line = _line_entries(self.shape)
        return self.counts[self._segments_in(tile)], self.offsets[tile.entries], line

    @property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """The layout as the functions of ``segments`` read it, if each row has its own segments."""
        width = row_length(self.shape)
        return self.counts, self.offsets, self.starts, block_rows(self.shape), width

    def _part(self, shape: torch.Size, first: int, last: int) -> SegmentLayout:
        counts = self.counts.view(self.shape[0], -1)[first:last]
        return self._of_slices(shape, counts, self.offsets[self.edges[first] : self.edges[last]])

    def _joined(self, shape: torch.Size, numbers: Sequence[int]) -> SegmentLayout:
        counts = self.counts.view(self.shape[0], -1)[numbers]
        slices = [self.offsets[self.edges[n] : self.edges[n + 1]] for n in numbers]
        return self._of_slices(shape, counts, torch.cat(slices))

    def _of_slices(self, shape: torch.Size, counts: Tensor, offsets: Tensor) -> SegmentLayout:
        line = _line_entries(self.shape)
        counts = counts.reshape(-1)
        in_line = counts.view(-1, _segments(line)).sum(1)
        before = torch.cat([in_line.new_zeros(1), in_line.cumsum(0)])
        step = block_entries(shape) // line
        blocks = torch.arange(0, len(before) - 1 + step, step, device=counts.device)
        starts = before[blocks.clamp(max=len(in_line))].to(index_dtype(len(offsets) + 1))
        return SegmentLayout(shape, len(offsets), starts, counts, offsets)

    def _segments_in(self, tile: Tile) -> slice:
        line = _line_entries(self.shape)
        end = tile.start + tile.numel
        return slice(tile.start // line * _segments(line), -(-end // line) * _segments(line))

    def _positions(self, counts: Tensor, offsets: Tensor) -> Tensor:
        line = _line_entries(self.shape)
        number = torch.arange(len(counts), device=counts.device)
        begin = number // _segments(line) * line + number % _segments(line) * SEGMENT
        repeats = torch.repeat_interleave(begin, counts.long(), output_size=len(offsets))
        return repeats + offsets


@dataclass(eq=False)
class BitmapLayout(Layout):
    """One bit per entry, pruned or not.

    Attributes:
        bits: eight entries per byte, the first in the lowest bit, shape ``(ceil(numel / 8),)``,
            uint8.
    """

    bits: Tensor

    @staticmethod
    def _index(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        flat = mask.reshape(-1)
        bits = torch.zeros(-(-len(flat) // 8), dtype=torch.uint8, device=mask.device)
        for shift in range(8):  # all at once would take two more bytes per entry
            every_eighth = flat[shift::8]
            bits[: len(every_eighth)] |= every_eighth.to(torch.uint8) << shift
        return {"bits": bits}

    def _part(self, shape: torch.Size, first: int, last: int) -> BitmapLayout:
        begin, end = first * shape[-2:].numel(), last * shape[-2:].numel()
        bits, skipped = self.bits[begin // 8 : -(-end // 8)], begin % 8
        mask = _unpacked(bits)[skipped : skipped + end - begin].view(shape)
        part = BitmapLayout.from_mask(mask)
        if skipped == 0 and end % 8 == 0:
            part.bits = bits
        return part

    def positions(self) -> Tensor:
        """Return the positions of the set bits."""
        return torch.nonzero_static(_unpacked(self.bits), size=self.nnz).squeeze(1)

    def positions_in(self, tile: Tile) -> Tensor:
        """Return the positions of the tile's set bits."""
        bits = self.bits[tile.start // 8 : -(-(tile.start + tile.numel) // 8)]
        if bits.is_cpu:  # NumPy takes a fifth of torch's time
            mask = np.unpackbits(bits.numpy(), bitorder="little").view(np.bool_)
            return torch.from_numpy(np.flatnonzero(mask))
        return torch.nonzero_static(_unpacked(bits), size=tile.nnz).squeeze(1)

    def kernels(self, tensor: Tensor) -> ModuleType | None:
        """Return those of Triton, which count within a block in 32 bits, on CUDA."""
        fits = tensor.is_cuda and tensor.is_floating_point()
        small = block_entries(self.shape) < INT32_ENTRIES
        return kernel_module("fused") if fits and small and triton_installed() else None

    def _index_in(self, tile: Tile) -> tuple[Tensor, Tensor, int, int, int]:
        """Return the tile's bits and blocks."""
        first, last = tile.blocks.start, tile.blocks.stop
        blocks = self.starts[first:], tile.entries.start, last - first, block_entries(self.shape)
        return self.bits[tile.start // 8 :], *blocks


FORMATS: dict[str, type[Layout]] = {
    "segments": SegmentLayout,
    "bitmap": BitmapLayout,
}


def layout_of(mask: Tensor, index_format: str | None = None) -> Layout:
    """Return the layout of the entries where ``mask`` (bool, any shape) is True.

    Args:
        mask: False where an entry is pruned.
        index_format: "segments" or "bitmap"; None selects "bitmap" for a mask on CUDA, else
            "segments".
    """
    return FORMATS[index_format or ("bitmap" if mask.is_cuda else "segments")].from_mask(mask)


def _line_entries(shape: torch.Size) -> int:
    """Return the entries that are cut into segments together: those of a row, or of a block."""
    length = shape[-1] if is_stack(shape) else row_length(shape)
    return length if length >= SHORTEST_LINE else max(block_entries(shape), 1)


def _segments(line: int) -> int:
    return -(-line // SEGMENT)


def _unpacked(bits: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return bits.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and(1).bool().flatten()
