"""Selects the kernels that write a dense tile from its kept entries and read them back.

A kernel module has the functions ``densify`` and ``compress``: ``reference`` runs on every device,
``fused`` on CUDA where Triton is installed, ``segments`` on CPU. The products with kept values,
which need no dense tile, are in ``products``, ``one_token`` and ``convolutions``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

SEGMENT = 256
"""Entries of a segment, so that a byte says where in it a kept entry lies."""

ROWS = 64
"""Rows of a weight that ``products`` multiplies with one segment before the next."""

LANES = 128
"""The most tokens that ``products`` multiplies together."""


class Bits(NamedTuple):
    """The kept entries of a tile as one bit per entry.

    Attributes:
        bits: uint8, eight entries per byte, the first in the lowest bit.
    """

    bits: Tensor


class Positions(NamedTuple):
    """The kept entries of a tile as one flat position per kept entry.

    Attributes:
        indices: positions in the whole tensor, shape ``(tile.nnz,)``.
        tile_start: position of the tile's first entry.
    """

    indices: Tensor
    tile_start: int


class Segments(NamedTuple):
    """The kept entries of a tile as offsets in segments of its lines.

    Attributes:
        counts: kept entries in each segment, int16.
        offsets: the offset of each kept entry in its segment, shape ``(tile.nnz,)``, uint8.
        line: entries of a line, which is cut into segments of ``SEGMENT`` entries.
    """

    counts: Tensor
    offsets: Tensor
    line: int


class Rows(NamedTuple):
    """The kept entries of a matrix of which each row has segments of its own.

    Attributes:
        counts: kept entries in each segment, row after row, int16.
        offsets: the offset of each kept entry in its segment, uint8.
        starts: kept entries before each block, int32 or int64.
        in_block: rows of a block.
        width: columns of the matrix.
    """

    counts: Tensor
    offsets: Tensor
    starts: Tensor
    in_block: int
    width: int


Index = Bits | Positions | Segments


class Blocks(NamedTuple):
    """The blocks of a tile; a fused kernel runs one program per block.

    Attributes:
        number: number of blocks.
        entries: entries of a block, kept or not; the tensor's last block may have fewer.
        starts: kept entries of the whole tensor before each block and after the last one.
        first: kept entries of the whole tensor before the tile.
    """

    number: int
    entries: int
    starts: Tensor
    first: int


def fused_kernels(index: Index, tensor: Tensor) -> ModuleType | None:
    """The kernels that do without positions, if there are any for ``index`` and ``tensor``."""
    if isinstance(index, Segments):
        return kernel_module("segments") if tensor.is_cpu else None
    if tensor.is_cuda and tensor.is_floating_point() and _triton_installed():
        return kernel_module("fused")
    return None


@cache
def kernel_module(name: str) -> ModuleType:
    """Import a module of this package at its first use: numba and Triton take time to import."""
    return import_module(f"{__name__}.{name}")


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
