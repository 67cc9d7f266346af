"""Returns freed memory from the allocators to the operating system.

When weights are pruned, their dense values and optimizer state are freed. The C library keeps the
pages for later allocations, which the smaller model does not make: in the middle of a training that
was more than half of the memory of the process.

For a tensor of the same size, glibc does not even use them: ``posix_memalign``, by which torch
allocates, asks for a little more than it keeps. So every tensor that is freed between two that stay
leaves a hole. Ranks therefore map larger blocks one by one, as glibc does with blocks from 32 MiB.
"""

from __future__ import annotations

import ctypes
import os

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_MAPPED = 4 << 20
_KEPT = 64 << 20
"""Free bytes at the end of the heap that glibc keeps for later blocks, at most."""


def release_freed_memory() -> None:
    """Return the free pages of the C library (glibc) and of CUDA's cache to the system.

    Other C libraries (musl, macOS) return large blocks when they are freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    torch.cuda.empty_cache()


def map_larger_blocks() -> None:
    """From now on, return blocks of 4 MiB and more to the system when they are freed.

    Smaller ones stay with the C library, because the system clears what it gives: from 1 MiB on a
    step took up to a fifth more time, from 4 MiB on no more. With another C library than glibc, or
    where the user has set its limits in the environment, nothing is changed.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not chosen:
        mallopt(_MMAP_THRESHOLD, _MAPPED)
        mallopt(_TRIM_THRESHOLD, _KEPT)
