"""Densifies and compresses a tile with torch's own operators, on every device.

``scatter_`` with int64 positions was the fastest of ``scatter_``, ``index_copy_`` and ``put_``,
with int32 and int64, on tiles that fit the cache of a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, index_select


def densify(positions: Tensor, values: Tensor, out: Tensor) -> None:
    """Fill the flat ``out`` with ``values`` at ``positions``, cast to its dtype, and with zeros."""
    out.zero_().scatter_(0, positions, values.to(out.dtype))


def compress(positions: Tensor, dense: Tensor, out: Tensor) -> None:
    """Copy the entries of the flat ``dense`` at ``positions`` to ``out``, cast to its dtype."""
    read = out if out.dtype == dense.dtype else dense.new_empty(len(out))
    index_select(dense, 0, positions, out=read)
    if read is not out:
        out.copy_(read)


def scatter(values: Tensor, positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of ``shape`` with ``values`` at the flat ``positions``; differentiable."""
    return values.new_zeros(prod(shape)).scatter(0, positions, values).view(tuple(shape))


def gather(dense: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of the flattened ``dense`` at ``positions``; differentiable."""
    return dense.reshape(-1).index_select(0, positions)
