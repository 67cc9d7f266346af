"""How much memory is free, by files that stand in for those of the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_axosparse.support.memory import available as available_memory
from lightning_axosparse.support.memory.available import available_bytes, free_bytes

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(
        "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nHugePages: 0\n"
    )
    return folder


def group(folder: Path, limit: str, used: int, droppable: int, v1: bool = False) -> None:
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if v1
        else ("memory.max", "memory.current")
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    prefix = "total_" if v1 else ""
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {droppable}\n")


def test_without_a_group_the_machine_counts(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 16 * GIB


@pytest.mark.parametrize("membership", ["0::/job/task\n", "0::/elsewhere/gone\n", "0::/\n"])
def test_the_tightest_group_of_v2_counts(proc: Path, tmp_path: Path, membership: str) -> None:
    """A container sees its own group as the root, perhaps under a path that only the host has."""
    (proc / "self" / "cgroup").write_text(membership)
    group(tmp_path, str(8 * GIB), 5 * GIB, 1 * GIB)
    group(tmp_path / "job", "max", 4 * GIB, 0)
    group(tmp_path / "job" / "task", str(6 * GIB), 4 * GIB, 1 * GIB)
    assert available_bytes(proc, tmp_path) == (3 if "task" in membership else 4) * GIB


def test_a_group_of_v1_counts(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/job\n1:name=systemd:/a\n")
    group(tmp_path / "memory", str(2**63 - 4096), 9 * GIB, 0, v1=True)
    group(tmp_path / "memory" / "job", str(4 * GIB), 3 * GIB, GIB // 2, v1=True)
    assert available_bytes(proc, tmp_path) == 3 * GIB // 2


def test_a_group_beyond_its_limit_has_none_left(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    group(tmp_path, str(GIB), 2 * GIB, 0)
    assert available_bytes(proc, tmp_path) == 0


def test_a_system_without_proc_has_all_its_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) > GIB // 4


def test_ranks_share_four_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available_memory, "available_bytes", lambda: 1000)
    assert free_bytes(torch.device("cpu"), 4) == 200


def test_what_the_allocator_of_a_gpu_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9999))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda:0"), 1) == 1200
