"""Selects the kernels that write a dense tile from its kept entries and read them back.

A kernel module has the functions ``densify`` and ``compress``: ``reference`` runs on every device,
``fused`` on CUDA where Triton is installed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

from torch import Tensor


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


class Gaps(NamedTuple):
    """The kept entries of a tile as distances from one kept entry to the next.

    Attributes:
        gaps: distances, shape ``(tile.nnz,)``, uint8.
        before: position in the whole tensor of the last kept entry before each block, int64.
        tile_start: position of the tile's first entry.
    """

    gaps: Tensor
    before: Tensor
    tile_start: int


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


def fused_kernels(tensor: Tensor) -> ModuleType | None:
    """The fused kernels, if they can read and write ``tensor``."""
    if tensor.is_cuda and tensor.is_floating_point() and _triton_installed():
        return import_module("lightning_axosparse.sparse.kernels.fused")
    return None


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
