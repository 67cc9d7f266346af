"""Kernels: the two operations that every sparse weight is made of, timed.

Both work on one tile of a layout. A kernel is a module with these two functions: ``reference`` runs
anywhere, ``fused`` on CUDA where Triton is installed.
"""

from __future__ import annotations

import time
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.timing import clock

if TYPE_CHECKING:
    from lightning_axosparse.sparse.layout import Layout, Tile


def densify(layout: Layout, tile: Tile, values: Tensor, out: Tensor) -> None:
    """Write one tile of a dense tensor: ``values`` where an entry is kept, zeros elsewhere.

    Args:
        layout: which entries are kept.
        tile: the part of the tensor to write.
        values: the kept entries in the tile, shape ``(tile.nnz,)``, any dtype.
        out: where to write, shape ``(tile.numel,)``, contiguous, dtype of ``values``.
    """
    start = time.time()
    _kernel(out).densify(layout, tile, values, out)
    clock.add("densify", start, time.time())


def compress(layout: Layout, tile: Tile, dense: Tensor, out: Tensor) -> None:
    """Read the kept entries of one tile of a dense tensor.

    Args:
        layout: which entries are kept.
        tile: the part of the tensor to read.
        dense: the tile, shape ``(tile.numel,)``, contiguous, any dtype.
        out: where to write them, shape ``(tile.nnz,)``, contiguous, dtype of ``dense``.
    """
    start = time.time()
    _kernel(out).compress(layout, tile, dense, out)
    clock.add("compress", start, time.time())


def _kernel(tensor: Tensor) -> ModuleType:
    if tensor.is_cuda and tensor.is_floating_point() and _triton_installed():
        return import_module("lightning_axosparse.sparse.kernels.fused")
    return reference


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None
