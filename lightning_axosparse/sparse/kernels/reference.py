"""Reference kernel: plain torch operators, differentiable, on any device.

``scatter_`` takes int32 indices as they are (torch >= 2.8) and was the fastest of ``scatter_``,
``index_copy_``, ``index_put_`` and ``put_`` on CPU; the other three first cast the indices to
int64, which costs up to 8 bytes a kept entry while they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor


def densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor of ``shape`` with ``values`` at the flat ``indices``, zeros elsewhere."""
    return values.new_zeros(prod(shape)).scatter_(0, indices, values).view(tuple(shape))


def compress(dense: Tensor, indices: Tensor) -> Tensor:
    """The entries of the flattened ``dense`` at ``indices``."""
    return dense.reshape(-1).index_select(0, indices)
