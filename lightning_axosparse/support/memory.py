"""Measures free memory, and returns the memory that tensors have freed to the system.

When weights are pruned, their dense values and optimizer state are freed. The C library keeps the
pages for later allocations, which a smaller model does not need: after a draw, that was more than
half of the memory of the process.

glibc does not reuse such a page even for a tensor of the same size: torch allocates by
``posix_memalign``, which asks for a little more than it keeps. So a tensor that is freed between
two others leaves a hole. In the step of a pruned model, holes were a tenth of the memory with glibc
2.36 (``benchmarks/memory``). Tensors of a step are therefore allocated by NumPy, and ranks map
larger blocks one by one, as glibc does with blocks from 32 MiB.

Pages of a library's file also count as memory of the process, once it has read them. A compiler
reads many, which nothing reads again.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import dispatch_mode_is_active

_USABLE_FRACTION = 0.8
"""Fraction of the free memory; the rest is for temporary tensors."""
_UNLIMITED = 1 << 60  # Without a limit, cgroup v1 has a number near 2^63.

MIN_NUMPY_BYTES = 2**16
"""Smaller tensors are allocated by torch, as their holes matter less than the time of the calls."""
_ALIGNMENT = 64
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_MIN_MAPPED_BYTES = (4 << 20) + (1 << 16)
"""Above 4 MiB, a common size of activations, whose pages would be cleared in each micro-batch."""
_MAX_HEAP_END_BYTES = 64 << 20
"""Free bytes at the end of the heap that glibc may keep for later blocks."""


def free_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that each of several ranks on a device or machine may still allocate.

    These are four fifths of the free memory, divided by the number of ranks.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that the allocator has cached is free for this rank.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    return int(_USABLE_FRACTION * free / ranks)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the free bytes of this machine, within the limits of the process's control groups.

    Control groups may be v1 or v2. Pages of files that the kernel can drop immediately count as
    free.
    """
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = 1024 * _numbers(meminfo)["MemAvailable:"]
    return max(0, min([machine, *_free_in_groups(proc / "self" / "cgroup", cgroups)]))


def _free_in_groups(membership: Path, cgroups: Path) -> Iterator[int]:
    """Yield the free bytes of each control group of the process, or ancestor, with a limit."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, files = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for ancestor in (group, *group.parents):  # In a container, up to the container's own.
            if ancestor.is_relative_to(root):
                yield from _free_in_group(ancestor, *files)


def _free_in_group(group: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    if not (group / limit).exists():
        return
    text = (group / limit).read_text().strip()
    if text != "max" and int(text) < _UNLIMITED:
        used = int((group / usage).read_text())
        yield int(text) - used + _numbers(group / "memory.stat").get(droppable, 0)


def _numbers(file: Path) -> dict[str, int]:
    """Return the first word of each line -> the number after it."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def reusable_zeros(shape: Sequence[int]) -> Tensor:
    """Return a float32 CPU tensor of zeros that leaves no hole when it is freed."""
    return _reusable(torch.zeros, np.zeros, shape)


def reusable_empty(shape: Sequence[int]) -> Tensor:
    """Return an uninitialized float32 CPU tensor that leaves no hole when it is freed."""
    return _reusable(torch.empty, np.empty, shape)


def _reusable(by_torch: Any, by_numpy: Any, shape: Sequence[int]) -> Tensor:
    size = math.prod(shape)
    # A mode that counts what operators allocate would not see NumPy's memory.
    if 4 * size < MIN_NUMPY_BYTES or dispatch_mode_is_active():
        tensor: Tensor = by_torch(tuple(shape), dtype=torch.float32, device="cpu")
        return tensor
    block = by_numpy(size + _ALIGNMENT // 4, np.float32)
    # Sliced by NumPy, as a view that an autograd.Function returns may not be changed in place.
    start = -block.__array_interface__["data"][0] % _ALIGNMENT // 4
    return torch.from_numpy(block[start : start + size].reshape(*shape))


def release_freed_memory() -> None:
    """Return the free pages of the C library (glibc) and of CUDA's cache to the system.

    Other C libraries (musl, macOS) return large blocks when they are freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    torch.cuda.empty_cache()


def release_library(name: str) -> None:
    """Return the pages of a library's file to the system, which reads them again when needed.

    Pages to which the process has written, such as relocated addresses, stay. On other systems than
    Linux nothing is done.
    """
    mappings = Path("/proc/self/smaps")
    if not mappings.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", mappings.read_text(), flags=re.MULTILINE):
        header, _, sizes = mapping.partition("\n")
        if name in header and _is_unchanged(header, sizes):
            first, last = (int(edge, 16) for edge in header.split()[0].split("-"))
            address, size = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
            madvise(address, size, mmap.MADV_DONTNEED)


def _is_unchanged(header: str, sizes: str) -> bool:
    """Return whether a mapping is private and read-only, and was never written to.

    A page that has been written to is anonymous, or in swap.
    """
    permissions = header.split()[1]
    written = re.findall(r"^(?:Anonymous|Swap): +(\d+) kB$", sizes, re.MULTILINE)
    return permissions in ("r--p", "r-xp") and written == ["0", "0"]


def map_larger_blocks() -> None:
    """From now on, return blocks of more than 4 MiB to the system when they are freed.

    Smaller ones stay with the C library, because the system clears the pages that it gives: with
    blocks from 1 MiB on, a step took up to a fifth more time.
    Nothing is changed for other C libraries than glibc, or if the user has set limits in the
    environment.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    has_limits = "glibc.malloc" in tunables or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not has_limits:
        mallopt(_MMAP_THRESHOLD, _MIN_MAPPED_BYTES)
        mallopt(_TRIM_THRESHOLD, _MAX_HEAP_END_BYTES)
