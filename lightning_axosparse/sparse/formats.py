"""Stores the positions of kept entries in one of three index formats.

======  =====================================  ============================================
format  bytes per kept entry                   where it pays
        at 50 / 80 / 90 / 95 % pruned
======  =====================================  ============================================
gaps    1.01 / 1.01 / 1.03 / 1.06              the default on CPU: as fast as coo
bitmap  0.25 / 0.63 / 1.26 / 2.52              the default on CUDA, where a kernel reads it
                                               in one pass; on CPU 1.4 to 6.5 times as slow
coo     4.00 / 4.00 / 4.01 / 4.02              small layers: 2 % of the step of a
                                               transformer block 192 wide
======  =====================================  ============================================

``benchmarks/overhead`` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.sparse.kernels import Bits, Gaps, Positions
from lightning_axosparse.sparse.layout import Layout, Tile, index_dtype
from lightning_axosparse.sparse.scratch import scratch


@dataclass(eq=False)
class CooLayout(Layout):
    """One integer per kept entry: its flat position (SAMO; Singh & Bhatele, IPDPS 2023).

    Attributes:
        indices: flat positions, shape ``(nnz,)``, int32 (int64 for tensors of 2^31 entries or
            more).
    """

    indices: Tensor

    @staticmethod
    def _index(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"indices": positions.to(index_dtype(mask.numel()))}

    def positions(self) -> Tensor:
        """Return the stored indices themselves."""
        return self.indices

    def positions_in(self, tile: Tile) -> Tensor:
        """Return the stored indices minus the tile's start."""
        positions = _scratch_positions(self, tile).copy_(self.indices[tile.entries])
        return positions.sub_(tile.start) if tile.start else positions

    def index_in(self, tile: Tile) -> Positions:
        """Return the tile's indices."""
        return Positions(self.indices[tile.entries], tile.start)


@dataclass(eq=False)
class GapLayout(Layout):
    """One byte per kept entry: its distance from the kept entry before.

    Attributes:
        gaps: distance from the kept entry before (for the first one, from position -1) modulo 256,
            shape ``(nnz,)``, uint8.
        jumps: the kept entries whose distance is 256 or more, ascending, int32 or int64.
        excess: their distances minus ``gaps``, int64.
        before: the last kept position before each block (-1: none), shape ``(blocks,)``, int64.
    """

    gaps: Tensor
    jumps: Tensor
    excess: Tensor
    before: Tensor

    @staticmethod
    def _index(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        ends = torch.cat([positions.new_full((1,), -1), positions])
        distances = ends.diff()
        gaps = distances.to(torch.uint8)  # wraps at 256
        jumps = (distances >= 256).nonzero().squeeze(1)
        return {
            "gaps": gaps,
            "jumps": jumps.to(index_dtype(len(positions))),
            "excess": distances[jumps] - gaps[jumps],
            "before": ends[starts[:-1].long()],
        }

    def positions(self) -> Tensor:
        """Return the cumulated distances."""
        if self.jumps.numel() == 0:
            return self.gaps.cumsum(0, dtype=torch.int64) - 1
        distances = self.gaps.long().index_add(0, self.jumps, self.excess)
        return distances.cumsum(0) - 1

    def positions_in(self, tile: Tile) -> Tensor:
        """Return the distances in the tile, cumulated from the last kept entry before it."""
        distances = _scratch_positions(self, tile).copy_(self.gaps[tile.entries])
        jumps = self._jumps_in(tile)
        if jumps.start < jumps.stop:
            entries = self.jumps[jumps] - tile.entries.start
            distances.index_add_(0, entries, self.excess[jumps])
        before = self.before[tile.blocks.start] if tile.start else -1
        distances[:1].add_(before - tile.start)
        return distances.cumsum_(0)

    def index_in(self, tile: Tile) -> Gaps | None:
        """Return the tile's gaps; None if some distance does not fit a byte."""
        if self.jumps.numel():
            return None
        return Gaps(self.gaps[tile.entries], self.before[tile.blocks], tile.start)

    def _jumps_in(self, tile: Tile) -> slice:
        if self.jumps.numel() == 0:
            return slice(0, 0)
        edges = self.jumps.new_tensor([tile.entries.start, tile.entries.stop])
        return slice(*torch.searchsorted(self.jumps, edges).tolist())


@dataclass(eq=False)
class BitmapLayout(Layout):
    """One bit per entry, kept or pruned.

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

    def positions(self) -> Tensor:
        """Return the positions of the set bits."""
        return torch.nonzero_static(_unpacked(self.bits), size=self.nnz).squeeze(1)

    def positions_in(self, tile: Tile) -> Tensor:
        """Return the positions of the tile's set bits."""
        held = self.bits[tile.start // 8 : -(-(tile.start + tile.numel) // 8)]
        if held.is_cpu:  # NumPy takes a fifth of torch's time
            bits = np.unpackbits(held.numpy(), bitorder="little").view(np.bool_)
            return torch.from_numpy(np.flatnonzero(bits))
        return torch.nonzero_static(_unpacked(held), size=tile.nnz).squeeze(1)

    def index_in(self, tile: Tile) -> Bits:
        """Return the tile's bits."""
        return Bits(self.bits[tile.start // 8 :])


FORMATS: dict[str, type[Layout]] = {
    "coo": CooLayout,
    "gaps": GapLayout,
    "bitmap": BitmapLayout,
}


def layout_of(mask: Tensor, index_format: str | None = None) -> Layout:
    """Return the layout that keeps the entries where ``mask`` (bool, any shape) is True.

    Args:
        mask: True where an entry is kept.
        index_format: "coo", "gaps" or "bitmap"; None selects "bitmap" for a mask on CUDA, else
            "gaps".

    Raises:
        ValueError: for another format.
    """
    index_format = index_format or ("bitmap" if mask.is_cuda else "gaps")
    if index_format not in FORMATS:
        raise ValueError(f"Unknown index format '{index_format}'. Choose one of {list(FORMATS)}.")
    return FORMATS[index_format].from_mask(mask)


def _scratch_positions(layout: Layout, tile: Tile) -> Tensor:
    return scratch.take("positions", tile.nnz, torch.int64, layout.starts.device)


def _unpacked(held: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
    return held.unsqueeze(1).bitwise_right_shift(shifts).bitwise_and(1).bool().flatten()
