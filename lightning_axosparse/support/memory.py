"""Measures how much memory is free, reuses what tensors have freed, and returns it to the system.

When weights are pruned, their dense values and optimizer state are freed. The C library keeps the
pages for later allocations, which the smaller model does not make: in the middle of a training that
was more than half of the memory of the process.

For a tensor of the same size, glibc does not even use them: ``posix_memalign``, by which torch
allocates, asks for a little more than it keeps. So every tensor that is freed between two that stay
leaves a hole. In a pruned model's step such holes were a tenth of the memory with glibc 2.36
(``benchmarks/memory``). Tensors of a step are therefore made in NumPy's memory, and ranks map
larger blocks one by one, as glibc does with blocks from 32 MiB.

Pages of a library's file are memory of the process, too, once it has read them. A compiler that has
done its work has read many, which nothing reads again.
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
"""Of the free memory; the rest is for temporary tensors."""
_UNLIMITED = 1 << 60  # without a limit, cgroup v1 has a number near 2^63

SMALLEST = 2**16
"""Bytes from which on a hole is worth the microseconds that the Python calls take."""
_ALIGNMENT = 64
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>
_MAPPED = 4 << 20
_KEPT = 64 << 20
"""Free bytes at the end of the heap that glibc keeps for later blocks, at most."""


def free_bytes(device: torch.device, ranks: int) -> int:
    """Bytes that one of several ranks with the same device or machine may still allocate.

    They are four fifths of what is free, divided by the number of ranks.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that the allocator has cached is free for this rank.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    return int(_USABLE_FRACTION * free / ranks)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of this machine, limited by every control group (v1, v2) of this process.

    Pages of files that the kernel can drop immediately count as free.
    """
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = 1024 * _numbers(meminfo)["MemAvailable:"]
    return max(0, min([machine, *_free_in_groups(proc / "self" / "cgroup", cgroups)]))


def _free_in_groups(membership: Path, cgroups: Path) -> Iterator[int]:
    """Free bytes of the control groups of the process and their ancestors that have a limit."""
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
        for ancestor in (group, *group.parents):  # up to that of the container, if there is one
            if ancestor.is_relative_to(root):
                yield from _free_in_group(ancestor, *files)


def _free_in_group(group: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    if not (group / limit).exists():
        return
    most = (group / limit).read_text().strip()
    if most != "max" and int(most) < _UNLIMITED:
        used = int((group / usage).read_text())
        yield int(most) - used + _numbers(group / "memory.stat").get(droppable, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The number after the first word of each line, by that word."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def reusable_zeros(shape: Sequence[int]) -> Tensor:
    """Return zeros of ``shape`` in float32 on CPU, aligned as torch's own tensors."""
    return _reusable(torch.zeros, np.zeros, shape)


def reusable_empty(shape: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor of ``shape`` in float32 on CPU, aligned as torch's own."""
    return _reusable(torch.empty, np.empty, shape)


def _reusable(by_torch: Any, by_numpy: Any, shape: Sequence[int]) -> Tensor:
    size = math.prod(shape)
    # A mode that counts what operators allocate would not see NumPy's memory.
    if 4 * size < SMALLEST or dispatch_mode_is_active():
        own: Tensor = by_torch(tuple(shape), dtype=torch.float32, device="cpu")
        return own
    block = by_numpy(size + _ALIGNMENT // 4, np.float32)
    # Sliced by NumPy: a view of a tensor may not be changed in place outside the function that
    # made it, where that is an autograd.Function.
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
    """Return the pages of a library's file to the system, which reads them again where needed.

    Pages to which the process has written, such as relocated addresses, stay. Nothing is done on
    other systems than Linux.
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
