"""Returns freed memory from the allocators to the operating system.

When weights are pruned, their dense values and optimizer state are freed. The C library keeps the
pages for later allocations, which the smaller model does not make: in the middle of a training that
was more than half of the memory of the process.
"""

from __future__ import annotations

import ctypes

import torch


def release_freed_memory() -> None:
    """Return the free pages of the C library (glibc) and of CUDA's cache to the system.

    Other C libraries (musl, macOS) return large blocks when they are freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    torch.cuda.empty_cache()
