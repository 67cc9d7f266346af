"""Reference kernel: plain torch operators, on any device.

``scatter_`` with int64 positions was the fastest of ``scatter_``, ``index_copy_`` and ``put_``,
with int32 and int64, on tiles that fit the cache of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor, index_select

if TYPE_CHECKING:
    from lightning_axosparse.sparse.layout import Layout, Tile


def densify(layout: Layout, tile: Tile, values: Tensor, out: Tensor) -> None:
    """Fill the flat ``out`` with ``values`` where an entry is kept, with zeros elsewhere."""
    out.zero_().scatter_(0, layout.positions_in(tile), values)


def compress(layout: Layout, tile: Tile, dense: Tensor, out: Tensor) -> None:
    """Copy the kept entries of the flat ``dense`` to ``out``."""
    index_select(dense, 0, layout.positions_in(tile), out=out)


def scatter(values: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor of ``shape`` with ``values`` at the flat ``positions``; differentiable."""
    return values.new_zeros(prod(shape)).scatter(0, positions, values).view(tuple(shape))


def gather(dense: Tensor, positions: Tensor) -> Tensor:
    """The entries of the flattened ``dense`` at ``positions``; differentiable."""
    return dense.reshape(-1).index_select(0, positions)
