"""Formats: the ways to write down which entries are kept, by what they cost.

Bytes a kept entry at 50 / 80 / 90 / 95 % pruned: ``coo`` 4, ``block`` 2, ``gaps`` 1,
``bitmap`` 0.25 / 0.625 / 1.25 / 2.5. ``benchmarks/overhead`` has their times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.layout import Layout, Tile, block_entries, index_dtype
from lightning_axosparse.sparse.scratch import scratch


@dataclass(eq=False)
class CooLayout(Layout):
    """One integer a kept entry: its flat position (SAMO; Singh & Bhatele, IPDPS 2023).

    Attributes:
        indices: flat positions, shape ``(nnz,)``, int32 (int64 for tensors of 2^31 entries or
            more).
    """

    indices: Tensor

    @staticmethod
    def _written(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"indices": positions.to(index_dtype(mask.numel()))}

    def positions(self) -> Tensor:
        """The stored indices themselves."""
        return self.indices

    def positions_in(self, tile: Tile) -> Tensor:
        """The stored indices, less the tile's start."""
        positions = _positions(self, tile).copy_(self.indices[tile.entries])
        return positions.sub_(tile.start) if tile.start else positions


@dataclass(eq=False)
class BlockLayout(Layout):
    """One small integer a kept entry: its position in its block.

    Attributes:
        stored: positions counted from the start of the block, shape ``(nnz,)``, 16 bits that count
            as unsigned (int32 where a row has more than 65536 entries).
    """

    stored: Tensor

    @staticmethod
    def _written(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        block = block_entries(mask.shape)
        return {"stored": (positions % block).to(torch.int16 if block <= 2**16 else torch.int32)}

    @property
    def local(self) -> Tensor:
        """The stored positions as what they are: torch cannot pickle uint16."""
        return self.stored.view(torch.uint16) if self.stored.itemsize == 2 else self.stored

    def positions(self) -> Tensor:
        """The stored positions and the starts of their blocks."""
        return self.local.long() + self._block_starts(slice(0, len(self.starts) - 1), self.nnz)

    def positions_in(self, tile: Tile) -> Tensor:
        """The stored positions and the starts of their blocks, in the tile."""
        positions = _positions(self, tile).copy_(self.local[tile.entries])
        return positions.add_(self._block_starts(tile.blocks, tile.nnz))

    def _block_starts(self, blocks: slice, nnz: int) -> Tensor:
        """Where the block of each kept entry starts, counted from the first of the blocks."""
        counts = self.starts[blocks.start : blocks.stop + 1].diff()
        starts = torch.arange(len(counts), device=counts.device) * block_entries(self.shape)
        return starts.repeat_interleave(counts, output_size=nnz)


@dataclass(eq=False)
class GapLayout(Layout):
    """One byte a kept entry: how far it lies behind the one before.

    Attributes:
        gaps: distance to the kept entry before, the first one's to position -1, modulo 256, shape
            ``(nnz,)``, uint8.
        jumps: the kept entries whose distance is 256 or more, ascending, int32 or int64.
        excess: what their distance has beyond ``gaps``, int64.
        before: the last kept position before each block (-1: none), shape ``(blocks,)``, int64.
    """

    gaps: Tensor
    jumps: Tensor
    excess: Tensor
    before: Tensor

    @staticmethod
    def _written(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        ends = torch.cat([positions.new_full((1,), -1), positions])
        distances = ends.diff()
        gaps = distances.remainder(256)
        jumps = (distances >= 256).nonzero().squeeze(1)
        return {
            "gaps": gaps.to(torch.uint8),
            "jumps": jumps.to(index_dtype(len(positions))),
            "excess": (distances - gaps)[jumps],
            "before": ends[starts[:-1].long()],
        }

    def positions(self) -> Tensor:
        """The sums of the distances."""
        if self.jumps.numel() == 0:
            return self.gaps.cumsum(0, dtype=torch.int64) - 1
        distances = self.gaps.long().index_add(0, self.jumps, self.excess)
        return distances.cumsum(0) - 1

    def positions_in(self, tile: Tile) -> Tensor:
        """The sums of the distances in the tile, from what lies before it."""
        distances = _positions(self, tile).copy_(self.gaps[tile.entries])
        jumps = self._jumps_in(tile)
        if jumps.start < jumps.stop:
            places = self.jumps[jumps] - tile.entries.start
            distances.index_add_(0, places, self.excess[jumps])
        before = self.before[tile.blocks.start] if tile.start else -1
        distances[:1].add_(before - tile.start)
        return distances.cumsum_(0)

    def _jumps_in(self, tile: Tile) -> slice:
        if self.jumps.numel() == 0:
            return slice(0, 0)
        edges = self.jumps.new_tensor([tile.entries.start, tile.entries.stop])
        return slice(*torch.searchsorted(self.jumps, edges).tolist())


@dataclass(eq=False)
class BitmapLayout(Layout):
    """One bit an entry, kept or not.

    Attributes:
        bits: eight entries a byte, the first in the lowest bit, shape ``(ceil(numel / 8),)``,
            uint8.
    """

    bits: Tensor

    @staticmethod
    def _written(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        flat = mask.reshape(-1)
        bits = torch.zeros(-(-len(flat) // 8), dtype=torch.uint8, device=mask.device)
        for place in range(8):  # not all at once: that takes two more bytes an entry
            every_eighth = flat[place::8]
            bits[: len(every_eighth)] |= every_eighth.to(torch.uint8) << place
        return {"bits": bits}

    def positions(self) -> Tensor:
        """The places of the set bits."""
        return torch.nonzero_static(_bits(self.bits), size=self.nnz).squeeze(1)

    def positions_in(self, tile: Tile) -> Tensor:
        """The places of the tile's set bits."""
        held = self.bits[tile.start // 8 : -(-(tile.start + tile.numel) // 8)]
        if held.is_cpu:  # NumPy takes a fifth of the time
            bits = np.unpackbits(held.numpy(), bitorder="little").view(np.bool_)
            return torch.from_numpy(np.flatnonzero(bits))
        return torch.nonzero_static(_bits(held), size=tile.nnz).squeeze(1)


FORMATS: dict[str, type[Layout]] = {
    "coo": CooLayout,
    "block": BlockLayout,
    "gaps": GapLayout,
    "bitmap": BitmapLayout,
}


def layout_of(mask: Tensor, index_format: str | None = None) -> Layout:
    """The layout that keeps the entries where ``mask`` (bool, any shape) is True.

    Args:
        mask: which entries are kept.
        index_format: "coo", "block", "gaps" or "bitmap"; None takes what is fastest on the mask's
            device: gaps, on CUDA the bitmap, which its kernel reads in one pass.

    Raises:
        ValueError: for another format.
    """
    index_format = index_format or ("bitmap" if mask.is_cuda else "gaps")
    if index_format not in FORMATS:
        raise ValueError(f"Unknown index format '{index_format}'. Take one of {list(FORMATS)}.")
    return FORMATS[index_format].from_mask(mask)


def _positions(layout: Layout, tile: Tile) -> Tensor:
    return scratch.take("positions", tile.nnz, torch.int64, layout.starts.device)


def _bits(held: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
    return held.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and(1).bool().flatten()
