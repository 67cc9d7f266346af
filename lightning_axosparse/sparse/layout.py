"""Layout: which entries of a pruned tensor are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd, prod

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import Self

from lightning_axosparse.sparse import kernels

INT32_ENTRIES = 2**31
"""Tensors with fewer entries than this are indexed by int32."""

BLOCK_ENTRIES = 4096
"""A block is the fewest rows with at least so many entries; formats count kept entries by block."""

TILE_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""About how many entries are dense at a time, by device: what a CPU's cache can hold, and enough to
fill a GPU."""


def index_dtype(numel: int) -> torch.dtype:
    """The integer type that indexes a flattened tensor of ``numel`` entries."""
    return torch.int32 if numel < INT32_ENTRIES else torch.int64


@dataclass(frozen=True)
class Tile:
    """Some whole rows (slices along the first dimension) of a tensor, and their kept entries.

    Attributes:
        rows: which rows.
        entries: which of the tensor's kept entries lie in them.
        blocks: which of the layout's blocks they are.
        start: flat position of the first entry.
        numel: number of entries, kept or not.
    """

    rows: slice
    entries: slice
    blocks: slice
    start: int
    numel: int

    @property
    def nnz(self) -> int:
        """Number of kept entries."""
        return int(self.entries.stop - self.entries.start)


@dataclass(eq=False)
class Layout(ABC):
    """The kept entries of one tensor, shared by its values, gradient and every optimizer state.

    A format (``formats.py``) is a subclass that writes their places down in tensor fields of its
    own. Kept entries are in ascending order of their flat position.

    Attributes:
        shape: shape of the dense tensor.
        nnz: number of kept entries.
        starts: the number of kept entries before each block, and of all, shape ``(blocks + 1,)``,
            int32 (int64 for 2^31 kept entries or more).
    """

    shape: torch.Size
    nnz: int
    starts: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> Self:
        """The layout that keeps the entries where ``mask`` (bool, any shape) is True."""
        positions = mask.reshape(-1).nonzero().squeeze(1)
        block = block_entries(mask.shape)
        edges = torch.arange(0, mask.numel() + block, max(block, 1), device=mask.device)
        starts = torch.searchsorted(positions, edges).to(index_dtype(len(positions) + 1))
        return cls(mask.shape, len(positions), starts, **cls._written(positions, starts, mask))

    @staticmethod
    @abstractmethod
    def _written(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """The format's own fields for kept entries at the flat ``positions`` (int64)."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Flat positions of all kept entries, shape ``(nnz,)``, int32 or int64.

        In operators that torch.compile can trace.
        """

    @abstractmethod
    def positions_in(self, tile: Tile) -> Tensor:
        """Positions of the tile's kept entries, counted from its start, int64; may be scratch."""

    @cached_property
    def tiles(self) -> list[Tile]:
        """The tensor in tiles, in order."""
        length, rows_in_block = row_length(self.shape), block_rows(self.shape)
        rows = self.shape.numel() // length if length else 0
        kept, blocks = self.starts.tolist(), len(self.starts) - 1
        limit = TILE_ENTRIES.get(self.starts.device.type, TILE_ENTRIES["cuda"])
        step = max(1, limit // max(rows_in_block * length, 1))
        tiles = []
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            top, bottom = first * rows_in_block, min(last * rows_in_block, rows)
            tiles.append(
                Tile(
                    slice(top, bottom),
                    slice(kept[first], kept[last]),
                    slice(first, last),
                    top * length,
                    (bottom - top) * length,
                )
            )
        return tiles

    @torch.no_grad()
    def compress(self, dense: Tensor) -> Tensor:
        """The kept entries of ``dense`` (of the layout's shape), shape ``(nnz,)``.

        Raises:
            ValueError: if ``dense`` has another shape.
        """
        if dense.shape != self.shape:
            raise ValueError(
                f"This layout keeps entries of a tensor of shape {tuple(self.shape)}; "
                f"got one of shape {tuple(dense.shape)}."
            )
        values = dense.new_empty(self.nnz)
        if dense.is_meta:  # of another stage
            return values
        if type(dense) not in (Tensor, Parameter):
            # A lazy weight would become dense in the operator that has our positions in scratch.
            dense = dense.clone()
        rows = dense.view(1) if dense.dim() == 0 else dense
        for tile in self.tiles:
            kernels.compress(self, tile, rows[tile.rows].reshape(-1), values[tile.entries])
        return values

    @torch.no_grad()
    def densify(self, values: Tensor) -> Tensor:
        """A new dense tensor of the layout's shape: ``values`` (shape ``(nnz,)``) and zeros."""
        dense = values.new_empty(self.shape)
        if values.is_meta:  # of another stage
            return dense
        self.fill(dense, values)
        return dense

    @torch.no_grad()
    def fill(self, dense: Tensor, values: Tensor) -> None:
        """Write ``values`` (shape ``(nnz,)``), in its dtype, and zeros to ``dense``."""
        flat = dense.view(-1)
        for tile in self.tiles:
            out = flat[tile.start : tile.start + tile.numel]
            kernels.densify(self, tile, values[tile.entries].to(dense.dtype), out)

    def mask(self) -> Tensor:
        """True where an entry is kept: bool, of the layout's shape."""
        return self.densify(torch.ones(self.nnz, dtype=torch.bool, device=self.starts.device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the layout consists of, by field."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes that the layout takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Self:
        """This layout with its tensors on ``device``; itself where they are there already."""
        if self.starts.device == device:
            return self
        moved = copy(self)
        moved.move(device)
        return moved

    def move(self, device: torch.device) -> None:
        """Take the tensors to ``device`` in place, for all who share this layout.

        Raises:
            RuntimeError: if they are on the meta device, where nothing is stored.
        """
        if self.starts.is_meta and device.type != "meta":
            raise RuntimeError(
                "Which entries are kept was forgotten when this module went to the meta device. "
                "Make a dense one and call sparsify(module, masks), or load_sparse(module, path)."
            )
        self.__dict__.pop("tiles", None)
        for name, tensor in self.tensors.items():
            setattr(self, name, tensor.to(device))

    def same_entries(self, other: Layout) -> bool:
        """Whether ``other`` keeps exactly the same entries of the same shape, in any format."""
        if self.shape != other.shape or self.nnz != other.nnz:
            return False
        there = other.to(self.starts.device)
        return torch.equal(self.positions().long(), there.positions().long())


def row_length(shape: torch.Size) -> int:
    """Entries of one slice along the first dimension."""
    return prod(shape[1:])


def block_entries(shape: torch.Size) -> int:
    """Entries of a block of a tensor of this shape; its last block may have fewer."""
    return block_rows(shape) * row_length(shape)


def block_rows(shape: torch.Size) -> int:
    """Rows in a block of a tensor of this shape, whose entries are a multiple of eight."""
    length = max(row_length(shape), 1)
    multiple = 8 // gcd(8, length)
    return -(-BLOCK_ENTRIES // (length * multiple)) * multiple
