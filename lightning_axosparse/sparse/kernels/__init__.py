"""The kernels that densify and compress tiles, and those that multiply by unpruned values.

A kernel module has the functions ``densify`` and ``compress``: ``reference`` runs on every device,
``fused`` on CUDA where Triton is installed, ``segments`` on CPU. The products, which need no dense
tile, are in ``products``, ``one_token`` and ``convolutions``.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

SEGMENT = 256
"""Entries of a segment, so that the offset of an unpruned entry in it fits into a byte."""

ROWS_OF_SUMS, ROWS_OF_FACTORS = 128, 64
"""Rows of a block, which ``products`` multiplies with one segment before the next.

In ``spmm_t`` each row has a vector of sums. In the other products it has a vector of factors, of up
to twice as many numbers.
"""

LANES = 128
"""The most tokens that ``products`` multiplies together."""

ZERO = 128
"""What ``int8`` rounds an input of zero to: its inputs are unsigned, and its values signed."""

SMALLEST = 1e-36
"""Inputs that are no larger are rounded to zero there: their reciprocals may be infinite."""

Span = tuple[int, int]
"""The first of some consecutive rows or tokens, and the one after the last."""


class Weight(NamedTuple):
    """A sparse matrix in flat arrays, as compiled loops read it.

    Attributes:
        counts: unpruned entries in each segment, row after row, int16.
        offsets: the place of each unpruned entry in its segment, uint8.
        height: rows of the matrix.
        width: its columns.
        values: the unpruned values, float32.
    """

    counts: Any
    offsets: Any
    height: int
    width: int
    values: Any


@cache
def kernel_module(name: str) -> ModuleType:
    """Import a module of this package at its first use: numba and Triton take time to import."""
    return import_module(f"{__name__}.{name}")


@cache
def triton_installed() -> bool:
    """Return whether ``fused`` can be imported."""
    return find_spec("triton") is not None
