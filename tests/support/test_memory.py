"""How much memory is free, by files that stand in for those of the kernel; what is returned."""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_axosparse import sparsify
from lightning_axosparse.support import memory
from lightning_axosparse.support.memory import (
    MIN_NUMPY_BYTES,
    available_bytes,
    free_bytes,
    map_larger_blocks,
    release_freed_memory,
    release_library,
    reusable_empty,
    reusable_zeros,
)

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
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert free_bytes(torch.device("cpu"), 4) == 200


def test_what_the_allocator_of_a_gpu_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9999))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda:0"), 1) == 1200


SHAPES = [(), (3,), (5, 0), (MIN_NUMPY_BYTES // 4,), (7, 33, 211)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [reusable_zeros, reusable_empty])
def test_a_tensor_is_as_torch_would_make_it(make, shape: tuple[int, ...]) -> None:
    tensor = make(shape)
    assert tensor.shape == shape
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert tensor._base is None
    assert tensor.storage_offset() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_zero(shape: tuple[int, ...]) -> None:
    before = reusable_zeros(shape).add_(1)
    del before
    assert not reusable_zeros(shape).any()


def test_the_memory_lives_as_long_as_the_tensor() -> None:
    tensors = [reusable_zeros((MIN_NUMPY_BYTES,)).fill_(i) for i in range(8)]
    views = [tensor[-5:] for tensor in tensors]
    del tensors
    others = [reusable_zeros((MIN_NUMPY_BYTES,)) for _ in range(8)]
    assert [float(view.mean()) for view in views] == list(range(8))
    assert not any(other.any() for other in others)


def test_what_leaves_an_autograd_function_may_be_changed_in_place() -> None:
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, source: Tensor) -> Tensor:
            return reusable_empty(source.shape).copy_(source)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient

    source = torch.ones(MIN_NUMPY_BYTES, requires_grad=True)
    Copy.apply(source).mul_(3).sum().backward()
    assert torch.equal(source.grad, torch.full((MIN_NUMPY_BYTES,), 3.0))


def test_a_mode_that_observes_operators_sees_what_is_allocated() -> None:
    seen = []

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func(*args, **(kwargs or {})))
            return seen[-1]

    with Observer():
        tensor = reusable_empty((MIN_NUMPY_BYTES,))
    assert tensor.data_ptr() in {made.data_ptr() for made in seen}


def resident() -> int:
    """Bytes of this process's resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_the_dense_weights_took_is_no_longer_the_process_s() -> None:
    # The first draw loads the compiled loops, which take memory themselves.
    sparsify(nn.Linear(512, 512), {"weight": torch.rand(512, 512) > 0.9})
    # A freed block of this size makes the C library keep all smaller ones.
    torch.zeros(2**22)
    model = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(40))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    release_freed_memory()
    dense = 3 * sum(parameter.nbytes for parameter in model.parameters())
    masks = {name: torch.rand_like(p) < 0.1 for name, p in model.named_parameters()}
    before = resident()

    sparsify(model, masks, optimizer)

    assert before - resident() > 0.7 * dense


def returned_between_kept() -> int:
    """Free ten tensors of 8 MiB that lie between kept ones; return how many MiB that returns."""
    torch.ones(31 << 18)  # A freed block of this size makes the C library keep all smaller ones.
    map_larger_blocks()
    between = [(torch.ones(2 << 20), torch.ones(1 << 16)) for _ in range(10)]
    before, kept = resident(), [small for _, small in between]
    del between
    assert len(kept) == 10
    return (before - resident()) >> 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what is freed")
def test_larger_blocks_are_returned_when_they_are_freed() -> None:
    # In a new process: the change is for good, and blocks freed before would be used again.
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        assert process.submit(returned_between_kept).result() > 0.9 * 10 * 8


def pages_of(library: str) -> tuple[int, int]:
    """Bytes that this process has of a library's file: as they are there, and written to."""
    read = written = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, size = line.partition(":")
        if "-" in key:
            ours = library in line
        elif ours and key in ("Rss", "Anonymous"):
            kept = int(size.split()[0]) << 10
            read += kept if key == "Rss" else -kept
            written += kept if key == "Anonymous" else 0
    return read, written


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_library_keeps_what_was_written_and_runs_on_with_the_rest() -> None:
    read, written = pages_of("libtorch_cpu")
    assert read > 0
    release_library("libtorch_cpu")
    assert pages_of("libtorch_cpu")[0] < read / 2
    assert pages_of("libtorch_cpu")[1] == written
    torch.testing.assert_close(torch.ones(64, 64) @ torch.ones(64, 64), torch.full((64, 64), 64.0))
