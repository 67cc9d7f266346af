"""Memory: how many bytes a rank may still take of what its device or machine has free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

_USED_AT_MOST = 0.8
"""Share of the free memory that is given away; the rest is for what lives but a moment."""
_UNLIMITED = 1 << 60  # cgroup v1 says so with a number near 2^63


def free_bytes(device: torch.device, ranks: int) -> int:
    """What one of the ranks that share a memory may still take of it.

    Args:
        device: where the rank computes.
        ranks: how many ranks share the device or, on CPU, the machine.

    Returns:
        Bytes: the rank's share of four fifths of what is free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What the allocator keeps for itself is free to this rank.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = available_bytes()
    return int(_USED_AT_MOST * free / ranks)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine, and every control group (v1, v2) of this process, has left.

    Pages of files that the kernel can drop at once count as left.

    Args:
        proc: where the proc file system is mounted; a system without one has all its memory left.
        cgroups: where the control groups are.
    """
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = 1024 * _numbers(meminfo)["MemAvailable:"]
    return max(0, min([machine, *_left_in_groups(proc / "self" / "cgroup", cgroups)]))


def _left_in_groups(membership: Path, cgroups: Path) -> Iterator[int]:
    """What the process's groups and those around them have left, where they have a limit."""
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for group in _with_ancestors(cgroups, path):
                yield from _left(group, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            for group in _with_ancestors(cgroups / "memory", path):
                yield from _left(group, *files)


def _with_ancestors(root: Path, path: str) -> Iterator[Path]:
    """A group, those around it, and the root, which in a container is the container's own."""
    group = root / path.lstrip("/")
    yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _left(group: Path, limit: str, usage: str, droppable: str) -> Iterator[int]:
    if not (group / limit).exists():
        return
    most = (group / limit).read_text().strip()
    if most != "max" and int(most) < _UNLIMITED:
        used = int((group / usage).read_text())
        yield int(most) - used + _numbers(group / "memory.stat").get(droppable, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The first number behind each word that begins a line."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}
