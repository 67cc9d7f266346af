"""Arena: memory of this rank that the other ranks of its node read and write where it lies.

An anonymous file (``memfd_create``) as long as the machine's memory, of which only what is in use
takes any. Every neighbour maps it once, and knows a block in it by its offset from then on: mapping
memory anew costs more than the all-reduce of what lies there.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections import deque
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Memory = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE


class Address(NamedTuple):
    """Where a neighbour finds an arena.

    Attributes:
        path: of its file, as any process of this user on the node sees it.
        token: what it begins with; on another node the path is another file, or none.
    """

    path: str
    token: bytes


class Arena:
    """Blocks of memory in one file."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        file = os.memfd_create("axosparse")
        weakref.finalize(self, os.close, file)
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self.memory: Memory = np.frombuffer(self._map, np.uint8)
        """All of it, in use or not."""
        self.address = Address(f"/proc/{self._owner}/fd/{file}", secrets.token_bytes(16))
        """What neighbours have to be told."""
        self.memory[:16] = np.frombuffer(self.address.token, np.uint8)
        self._holes = [(_PAGE, size)]  # disjoint, in order
        self._returned: deque[tuple[int, int]] = deque()

    def block(self, nbytes: int) -> Tensor:
        """Bytes (1-D uint8), given back when no tensor lives in them any more.

        Raises:
            MemoryError: if no hole is left that is as large.
        """
        while self._returned:
            self._add_hole(*self._returned.popleft())
        length = -(-nbytes // _PAGE) * _PAGE
        for index, (start, end) in enumerate(self._holes):
            if end - start >= length:
                self._holes[index] = (start + length, end)
                # The tensor's storage holds on to this view of the memory and nobody else does.
                block = self.memory[start : start + nbytes]
                weakref.finalize(block, self._give_back, start, start + length).atexit = False
                return torch.from_numpy(block)
        raise MemoryError(f"No {nbytes / 2**20:.0f} MiB in one piece are left in shared memory.")

    def offset(self, tensor: Tensor) -> int:
        """How many bytes behind the beginning a contiguous tensor lies; elsewhere if negative."""
        offset = tensor.data_ptr() - self.memory.ctypes.data
        return offset if offset < self.memory.size else -1

    def _give_back(self, start: int, end: int) -> None:
        # A forked process, such as one that loads data, only loses its view.
        if os.getpid() == self._owner:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)
            self._returned.append((start, end))  # Garbage is collected in the midst of anything.

    def _add_hole(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (start, end)]):
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            elif hole[0] < hole[1]:
                merged.append(hole)
        self._holes = merged


def arena() -> Arena | None:
    """The arena of this process; None where the operating system does not provide for one."""
    return _arena_of(os.getpid())


@cache
def _arena_of(process: int) -> Arena | None:
    try:
        return Arena()
    except (AttributeError, OSError):  # no memfd_create; a limit on address space
        return None


@cache
def opened(address: Address) -> Memory:
    """A neighbour's arena, or one's own.

    Raises:
        OSError: if this process cannot open it, or there is something else.
        ValueError: likewise.
    """
    own = arena()
    if own is not None and own.address == address:
        return own.memory
    file = os.open(address.path, os.O_RDWR)
    try:
        memory: Memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
    finally:
        os.close(file)
    if memory[:16].tobytes() != address.token:
        raise ValueError(f"What lies at {address.path} is not a neighbour's arena.")
    return memory
