"""Freed memory goes back to the system."""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_axosparse import sparsify
from lightning_axosparse.support.memory.release import (
    map_larger_blocks,
    release_freed_memory,
    release_library,
)


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
