"""Allocates tensors in memory that glibc uses again for others of their size.

``posix_memalign``, by which torch allocates, asks glibc for a little more than it keeps, so that
what one tensor freed is too small for the next of the same size. In a pruned model's step, such
holes were a tenth of the memory with glibc 2.36 (``benchmarks/memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import dispatch_mode_is_active

SMALLEST = 2**16
"""Bytes from which on a hole is worth the microseconds that the Python calls take."""
_ALIGNMENT = 64


def zeros(shape: Sequence[int]) -> Tensor:
    """Return zeros of ``shape`` in float32 on CPU, aligned as torch's own tensors."""
    if not _is_worth_it(shape):
        return torch.zeros(tuple(shape), dtype=torch.float32, device="cpu")
    return _aligned(np.zeros(_padded(shape), np.float32), shape)


def empty(shape: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor of ``shape`` in float32 on CPU, aligned as torch's own."""
    if not _is_worth_it(shape):
        return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    return _aligned(np.empty(_padded(shape), np.float32), shape)


def _is_worth_it(shape: Sequence[int]) -> bool:
    # A mode that counts what operators allocate would not see NumPy's memory.
    return 4 * math.prod(shape) >= SMALLEST and not dispatch_mode_is_active()


def _padded(shape: Sequence[int]) -> int:
    return math.prod(shape) + _ALIGNMENT // 4


def _aligned(block: Any, shape: Sequence[int]) -> Tensor:
    # Sliced by NumPy: a view of a tensor may not be changed in place outside the function that
    # made it, where that is an autograd.Function.
    start = -block.__array_interface__["data"][0] % _ALIGNMENT // 4
    return torch.from_numpy(block[start : start + math.prod(shape)].reshape(*shape))
