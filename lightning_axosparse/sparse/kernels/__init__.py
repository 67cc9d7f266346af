"""Kernels: the two operations that every sparse weight is made of, timed.

``densify`` scatters kept values into a fresh dense tensor, ``compress`` gathers them back. A kernel
for another device is one more module with the same two functions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.timing import clock


def densify(values: Tensor, indices: Tensor, shape: Sequence[int]) -> Tensor:
    """A new dense tensor with ``values`` at ``indices`` and zeros elsewhere.

    Args:
        values: kept entries, shape ``(nnz,)``, any dtype.
        indices: where they lie in the flattened tensor, shape ``(nnz,)``, int32 or int64.
        shape: shape of the dense tensor.
    """
    with clock.span("densify"):
        return reference.densify(values, indices, shape)


def compress(dense: Tensor, indices: Tensor) -> Tensor:
    """The entries of the flattened ``dense`` at ``indices``: a new tensor of shape ``(nnz,)``."""
    with clock.span("compress"):
        return reference.compress(dense, indices)
