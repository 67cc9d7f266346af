"""Freed: hand memory that was freed back to the system, which allocators would keep to themselves.

The weights and the optimizer state of before a draw lie between what stays. The C library goes on
holding their pages, for allocations that a smaller model no longer makes: in mid-training that was
more than half of what the process took.
"""

from __future__ import annotations

import ctypes

import torch


def return_freed_memory() -> None:
    """Give the pages of freed memory back: those of the C library (glibc) and of CUDA's cache.

    Other C libraries (musl, macOS) give large blocks back by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    torch.cuda.empty_cache()
