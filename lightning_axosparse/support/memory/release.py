"""Returns freed memory from the allocators to the operating system.

When weights are pruned, their dense values and optimizer state are freed. The C library keeps the
pages for later allocations, which the smaller model does not make: in the middle of a training that
was more than half of the memory of the process.

For a tensor of the same size, glibc does not even use them: ``posix_memalign``, by which torch
allocates, asks for a little more than it keeps. So every tensor that is freed between two that stay
leaves a hole. Ranks therefore map larger blocks one by one, as glibc does with blocks from 32 MiB.

Pages of a library's file are memory of the process, too, once it has read them. A compiler that has
done its work has read many, which nothing reads again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

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


def release_library(name: str) -> None:
    """Return the pages of a library's file to the system, which reads them again where needed.

    Pages to which the process has written, such as relocated addresses, stay. Nothing is done on
    other systems than Linux.

    Args:
        name: part of the file's path.
    """
    mappings = Path("/proc/self/smaps")
    if not mappings.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", mappings.read_text(), flags=re.MULTILINE):
        header, _, sizes = mapping.partition("\n")
        if name in header and _as_in_the_file(header, sizes):
            first, last = (int(edge, 16) for edge in header.split()[0].split("-"))
            address, size = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
            madvise(address, size, mmap.MADV_DONTNEED)


def _as_in_the_file(header: str, sizes: str) -> bool:
    """Return whether a mapping is private, cannot be written to, and never has been.

    A page that has been written to is anonymous, or in swap.
    """
    permissions = header.split()[1]
    written = re.findall(r"^(?:Anonymous|Swap): +(\d+) kB$", sizes, re.MULTILINE)
    return permissions in ("r--p", "r-xp") and written == ["0", "0"]


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
