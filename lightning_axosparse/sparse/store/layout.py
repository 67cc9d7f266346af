"""Describes which entries of a tensor are unpruned, and compresses tensors to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from math import gcd, prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from typing_extensions import Self

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.support.torch_internals import version_of
from lightning_axosparse.support.trace import clock, now
from lightning_axosparse.support.troubleshooting import see

INT32_ENTRIES = 2**31
"""Tensors with fewer entries than this are indexed by int32."""

SHORTEST_LINE = 64
"""Shorter rows would take more bytes for the numbers of unpruned entries than for their offsets."""

BLOCK_ENTRIES = 4096
"""A block has the fewest rows with at least this many entries; a layout counts entries by block."""

TILE_ENTRIES = {"cpu": 2**20, "cuda": 2**26}
"""Approximate entries of a tile, by device: they fit a CPU's cache, and occupy a GPU."""


def index_dtype(numel: int) -> torch.dtype:
    """Return the integer dtype that indexes a flattened tensor of ``numel`` entries."""
    return torch.int32 if numel < INT32_ENTRIES else torch.int64


@dataclass(frozen=True)
class Tile:
    """Consecutive rows (slices along the first dimension) of a tensor, and their unpruned entries.

    Attributes:
        rows: the rows.
        entries: the unpruned entries in them, as a slice of all unpruned entries.
        blocks: the layout's blocks that they consist of.
        start: flat position of the first entry.
        numel: number of entries, pruned or not.
        index: the part of the layout's index that its kernels read.
    """

    rows: slice
    entries: slice
    blocks: slice
    start: int
    numel: int
    index: tuple[Any, ...] = ()

    @property
    def nnz(self) -> int:
        """Number of unpruned entries."""
        return int(self.entries.stop - self.entries.start)


@dataclass(eq=False)
class Layout(ABC):
    """The unpruned entries of one tensor, shared by its values, gradient and optimizer state.

    An index format (``formats.py``) is a subclass with tensor fields for their positions. Unpruned
    entries are in ascending order of their flat position.

    Attributes:
        shape: shape of the dense tensor.
        nnz: number of unpruned entries.
        starts: the number of unpruned entries before each block and in the whole tensor, shape
            ``(blocks + 1,)``, int32 (int64 for 2^31 unpruned entries or more).
    """

    shape: torch.Size
    nnz: int
    starts: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> Self:
        """Return the layout of the entries where ``mask`` (bool, any shape) is True."""
        positions = mask.reshape(-1).nonzero().squeeze(1)
        block = block_entries(mask.shape)
        edges = torch.arange(0, mask.numel() + block, max(block, 1), device=mask.device)
        starts = torch.searchsorted(positions, edges).to(index_dtype(len(positions) + 1))
        return cls(mask.shape, len(positions), starts, **cls._index(positions, starts, mask))

    @staticmethod
    @abstractmethod
    def _index(positions: Tensor, starts: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Return the format's fields for unpruned entries at the flat ``positions`` (int64)."""

    @abstractmethod
    def positions(self) -> Tensor:
        """Return the flat positions of all unpruned entries, shape ``(nnz,)``, int32 or int64.

        It uses only operators that torch.compile can trace.
        """

    @abstractmethod
    def positions_in(self, tile: Tile) -> Tensor:
        """Return the positions of the tile's unpruned entries, counted from its start, int64."""

    @abstractmethod
    def kernels(self, tensor: Tensor) -> ModuleType | None:
        """Return the kernels that do without positions, if there are any for a tile ``tensor``."""

    @abstractmethod
    def _index_in(self, tile: Tile) -> tuple[Any, ...]:
        """Return the tile's part of the index as these kernels read it."""

    @abstractmethod
    def _part(self, shape: torch.Size, first: int, last: int) -> Layout:
        """Return the layout of the slices from ``first`` to ``last``, which have this shape."""

    def part(self, first: int, last: int | None = None) -> Layout:
        """Return the layout of some slices along the first dimension, on this one's index.

        Args:
            first: the first slice.
            last: the one after the last; None: the slice ``first`` alone, without that dimension.
        """
        shape = self.shape[1:] if last is None else torch.Size([last - first, *self.shape[1:]])
        if (first, last) not in self._parts:
            self._parts[first, last] = self._part(shape, first, last or first + 1)
        return self._parts[first, last]

    def joined(self, numbers: Sequence[int]) -> Layout:
        """Return the layout of a stack of slices with these numbers, which may repeat."""
        joined = self._joined(torch.Size([len(numbers), *self.shape[1:]]), numbers)
        # Products read each slice where it is, and no edges have to be computed.
        joined._parts.update({(at, None): self.part(n) for at, n in enumerate(numbers)})
        sizes = (self.edges[n + 1] - self.edges[n] for n in numbers)
        joined.edges = list(accumulate(sizes, initial=0))
        return joined

    def _joined(self, shape: torch.Size, numbers: Sequence[int]) -> Layout:
        """Return the layout of these slices, stacked to this shape."""
        return self.from_mask(self.mask()[numbers].view(shape))

    @cached_property
    def _parts(self) -> dict[tuple[int, int | None], Layout]:
        return {}

    @cached_property
    def edges(self) -> list[int]:
        """The numbers of unpruned entries before each slice of the first dimension, and in all."""
        if block_rows(self.shape) == 1:
            return self.starts.tolist()
        return [0, *self.mask().flatten(1).sum(1).cumsum(0).tolist()]

    @cached_property
    def tiles(self) -> list[Tile]:
        """The tiles that the tensor consists of, in order."""
        length, rows_in_block = row_length(self.shape), block_rows(self.shape)
        rows = self.shape.numel() // length if length else 0
        starts, blocks = self.starts.tolist(), len(self.starts) - 1
        limit = TILE_ENTRIES.get(self.starts.device.type, TILE_ENTRIES["cuda"])
        step = max(1, limit // max(rows_in_block * length, 1))
        tiles = []
        for first in range(0, blocks, step):
            last = min(first + step, blocks)
            top, bottom = first * rows_in_block, min(last * rows_in_block, rows)
            tile = Tile(
                slice(top, bottom),
                slice(starts[first], starts[last]),
                slice(first, last),
                top * length,
                (bottom - top) * length,
            )
            tiles.append(replace(tile, index=self._index_in(tile)))
        return tiles

    @torch.no_grad()
    def compress(self, dense: Tensor) -> Tensor:
        """Return the unpruned entries of ``dense`` (of the layout's shape), shape ``(nnz,)``.

        Raises:
            ValueError: if ``dense`` has another shape.
        """
        if dense.shape != self.shape:
            raise ValueError(
                f"This layout keeps entries of a tensor of shape {tuple(self.shape)}; "
                f"got one of shape {tuple(dense.shape)}." + see("sparse-storage")
            )
        values = dense.new_empty(self.nnz)
        if dense.is_meta:  # the parameter of another stage
            return values
        if type(dense) not in (Tensor, Parameter):
            dense = dense.clone()  # of a sparse weight once, not for each tile
        rows = dense.view(1) if dense.dim() == 0 else dense
        for tile in self.tiles:
            self.compress_tile(tile, rows[tile.rows].reshape(-1), values[tile.entries])
        return values

    @torch.no_grad()
    def densify(self, values: Tensor) -> Tensor:
        """Return a dense tensor of the layout's shape: ``values`` (shape ``(nnz,)``) and zeros."""
        dense = values.new_empty(self.shape)
        if values.is_meta:  # the parameter of another stage
            return dense
        self.fill(dense, values)
        return dense

    @torch.no_grad()
    def fill(self, dense: Tensor, values: Tensor) -> None:
        """Write ``values`` (shape ``(nnz,)``), cast to its dtype, and zeros to ``dense``."""
        flat = dense.view(-1)
        for tile in self.tiles:
            out = flat[tile.start : tile.start + tile.numel]
            self.densify_tile(tile, values[tile.entries], out)

    def densify_tile(self, tile: Tile, values: Tensor, out: Tensor) -> None:
        """Write one tile of a dense tensor: ``values`` at the unpruned entries, and zeros.

        Args:
            tile: the part of the tensor to write.
            values: the unpruned values in the tile, shape ``(tile.nnz,)``, any dtype.
            out: where to write, shape ``(tile.numel,)``, contiguous, any dtype.
        """
        start = now()
        kernels = self.kernels(out)
        if kernels is None:
            reference.densify(self.positions_in(tile), values, out)
        else:
            kernels.densify(*tile.index, values.contiguous(), out)
        clock.add("densify", start, now())

    def compress_tile(self, tile: Tile, dense: Tensor, out: Tensor) -> None:
        """Read the unpruned entries of one tile of a dense tensor.

        Args:
            tile: the part of the tensor to read.
            dense: the tile, shape ``(tile.numel,)``, any dtype.
            out: where to write them, shape ``(tile.nnz,)``, contiguous, any dtype.
        """
        start = now()
        kernels = self.kernels(out)
        if kernels is None:
            reference.compress(self.positions_in(tile), dense, out)
        else:
            # An expanded tensor, as the gradient of a sum is, has a flat view with a stride of 0.
            kernels.compress(*tile.index, dense.contiguous(), out)
        clock.add("compress", start, now())

    def mask(self) -> Tensor:
        """Return a bool tensor of the layout's shape, False where an entry is pruned."""
        return self.densify(torch.ones(self.nnz, dtype=torch.bool, device=self.starts.device))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the layout, by field."""
        return {k: v for k, v in self.__getstate__().items() if isinstance(v, Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes that the layout takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Self:
        """Return this layout with its tensors on ``device``; itself if they are there already."""
        if self.starts.device == device:
            return self
        moved = copy(self)
        moved.move(device)
        return moved

    def move(self, device: torch.device) -> None:
        """Move the tensors to ``device`` in place, for every module that shares this layout.

        Raises:
            RuntimeError: if they are on the meta device, where nothing is stored.
        """
        if self.starts.is_meta and device.type != "meta":
            raise RuntimeError(
                "Which entries are kept was forgotten when this module moved to the meta device. "
                "Build a dense module and call sparsify(module, masks), or load_sparse(module, "
                "path)." + see("sparse-storage")
            )
        self.__dict__ = self.__getstate__()
        for name, tensor in self.tensors.items():
            setattr(self, name, tensor.to(device))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields; cached properties are not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def same_entries(self, other: Layout) -> bool:
        """Return whether ``other``, in any format, has the same shape and unpruned entries."""
        if self.shape != other.shape or self.nnz != other.nnz:
            return False
        there = other.to(self.starts.device)
        return torch.equal(self.positions().long(), there.positions().long())


def check_unchanged(values: Tensor, version: int, layout: Layout) -> None:
    """Check that unpruned values have not changed since the forward pass read them.

    Autograd checks the versions of the tensors it saves. Unpruned values are not saved, because the
    parameter stays in memory anyway.

    Raises:
        RuntimeError: if their version is not ``version`` any more.
    """
    if version_of(values) != version:
        raise RuntimeError(
            f"The unpruned values of a sparse weight of shape {tuple(layout.shape)} were changed "
            "in place after the forward pass that read it and before the backward pass that needs "
            "it again. Step the optimizer, load weights or change them only after backward."
            + see("sparse-storage")
        )


def row_length(shape: torch.Size) -> int:
    """Return the entries of one slice along the first dimension."""
    return prod(shape[1:])


def is_stack(shape: torch.Size) -> bool:
    """Return whether a tensor is a stack of matrices that layers multiply by, as experts are.

    Each row of the matrices is then cut into segments (``formats.py``). Kernels of ``nn.Conv1d``
    have three dimensions, too, of which the last is shorter.
    """
    return len(shape) == 3 and shape[-1] >= SHORTEST_LINE


def block_entries(shape: torch.Size) -> int:
    """Return the entries of a block of a tensor of this shape; the last block may have fewer."""
    return block_rows(shape) * row_length(shape)


def block_rows(shape: torch.Size) -> int:
    """Return the rows of a block of a tensor of this shape; its entries are a multiple of eight."""
    length = max(row_length(shape), 1)
    multiple = 8 // gcd(8, length)
    return -(-BLOCK_ENTRIES // (length * multiple)) * multiple
