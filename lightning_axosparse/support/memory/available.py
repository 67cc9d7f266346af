"""Measures how many bytes a rank may still allocate on its device or machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_USABLE_FRACTION = 0.8
"""Of the free memory; the rest is for temporary tensors."""
_UNLIMITED = 1 << 60  # without a limit, cgroup v1 has a number near 2^63


def free_bytes(device: torch.device, ranks: int) -> int:
    """Bytes that one of several ranks with the same memory may still allocate.

    Args:
        device: where the rank computes.
        ranks: how many ranks share the device or, on CPU, the machine.

    Returns:
        Bytes: four fifths of what is free, divided by the number of ranks.
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

    Args:
        proc: where the proc file system is mounted; without one, all memory counts as free.
        cgroups: where the control groups are mounted.
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
            for group in _with_ancestors(cgroups, path):
                yield from _free_in_group(group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            for group in _with_ancestors(cgroups / "memory", path):
                yield from _free_in_group(group, *files)


def _with_ancestors(root: Path, path: str) -> Iterator[Path]:
    """A group and its ancestors up to the root, which is that of the container if there is one."""
    group = root / path.lstrip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


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
