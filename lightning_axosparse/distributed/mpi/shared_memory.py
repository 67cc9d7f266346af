"""Allocates memory that the other ranks of a node can read and write, and passes blocks in it.

An arena is an anonymous file (``memfd_create``) as long as the machine's memory; only the parts in
use take memory. Every other rank maps it once, and finds a block in it by its offset: mapping each
block would take longer than the all-reduce of its content.

A block is passed in a slot, a part of the sender's arena: the sender copies the block into it and
sends the address of the slot. So the transfer needs no progress of MPI while the two ranks compute.
The receiver uses the slot as the memory of a tensor. The slot is free again when no tensor uses it,
even if the sender does not use its slots any more.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import weakref
from collections import defaultdict, deque
from functools import cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_axosparse.support.troubleshooting import see

if TYPE_CHECKING:
    from mpi4py import MPI


Memory = NDArray[np.uint8]

_PAGE = mmap.PAGESIZE

_HEADER_BYTES = 64  # The first is 1 while the slot is in use; the others align the block.


def memory_is_ordered() -> bool:
    """Return whether other processes see writes to shared memory in their order."""
    return platform.machine() in ("x86_64", "AMD64")


class Address(NamedTuple):
    """The path of an arena for other ranks, and its first bytes, which tell it from other files."""

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
        """The whole arena, in use or not."""
        self.address = Address(f"/proc/{self._owner}/fd/{file}", secrets.token_bytes(16))
        """The argument of :func:`open_arena` in another rank."""
        self.memory[:16] = np.frombuffer(self.address.token, np.uint8)
        self._free = [(_PAGE, size)]  # Disjoint ranges, in order.
        self._returned: deque[tuple[int, int]] = deque()

    def block(self, nbytes: int) -> Tensor:
        """Allocate bytes (1-D uint8), which are free again when no tensor uses them any more."""
        while self._returned:
            self._add_free(*self._returned.popleft())
        length = -(-nbytes // _PAGE) * _PAGE
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index] = (start + length, end)
                # Only the tensor's storage refers to this view of the memory.
                block = self.memory[start : start + nbytes]
                weakref.finalize(block, self._return, start, start + length).atexit = False
                return torch.from_numpy(block)
        raise MemoryError(
            f"No {nbytes / 2**20:.0f} MiB in one piece are left in shared memory." + see("grid")
        )

    def offset(self, tensor: Tensor) -> int:
        """Return the offset in bytes of a contiguous tensor; negative if it is elsewhere."""
        offset = tensor.data_ptr() - self.memory.ctypes.data
        return offset if offset < self.memory.size else -1

    def _return(self, start: int, end: int) -> None:
        # In a forked process, such as a worker of a DataLoader, only a copy of the view ends.
        if os.getpid() == self._owner:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)
            # The garbage collector may call this in the middle of `block`.
            self._returned.append((start, end))

    def _add_free(self, start: int, end: int) -> None:
        merged: list[tuple[int, int]] = []
        for free in sorted([*self._free, (start, end)]):
            if merged and merged[-1][1] == free[0]:
                merged[-1] = (merged[-1][0], free[1])
            elif free[0] < free[1]:
                merged.append(free)
        self._free = merged


def arena() -> Arena | None:
    """Return the arena of this process; None if the operating system does not allow one."""
    return _arena_of(os.getpid())


@cache  # Per process, as a forked process needs its own.
def _arena_of(process: int) -> Arena | None:
    try:
        return Arena()
    except (AttributeError, OSError):  # No memfd_create, or a limit on address space.
        return None


@cache  # Each arena is mapped once.
def open_arena(address: Address) -> Memory | None:
    """Return the memory of any rank's arena; None if that rank is on another node."""
    own = arena()
    if own is not None and own.address == address:
        return own.memory
    try:
        file = os.open(address.path, os.O_RDWR)
        try:
            memory = np.frombuffer(mmap.mmap(file, 0), np.uint8)
        finally:
            os.close(file)
    except (OSError, ValueError):  # On another node the path is another file, or none.
        return None
    return memory if memory[:16].tobytes() == address.token else None


class BlockPool:
    """Allocates tensors in blocks that it uses again; on the CPU these are in shared memory.

    New memory costs a page fault every 4 KiB, which took longer than the all-reduce of its content.
    On other devices, PyTorch's allocator reuses blocks itself.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate an uninitialized tensor; its block is free when no tensor uses its storage."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        nbytes = prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        free = self._free[nbytes]
        block = free.pop() if free else _new_block(nbytes)
        # Only the tensor's storage refers to this view of the block.
        view = block.numpy()
        weakref.finalize(view, free.append, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(size)


def _new_block(nbytes: int) -> Tensor:
    own = arena()
    return torch.empty(nbytes, dtype=torch.uint8) if own is None else own.block(nbytes)


class SlotAddress(NamedTuple):
    """The arena of a slot, the slot's offset there, and the bytes of its block."""

    arena: Address
    offset: int
    size: int


class SlotWriter:
    """The slots of this process's arena that this rank fills and one other rank reads."""

    def __init__(self) -> None:
        own = arena()
        assert own is not None
        self._own, self._slots = own, list[Memory]()
        _left[:] = filter(_is_in_use, _left)
        weakref.finalize(self, _leave_to_readers, self._slots).atexit = False

    def write(self, block: Tensor) -> SlotAddress:
        """Copy a block (1-D uint8, CPU, not empty) into a free slot, or into a new one."""
        length = _HEADER_BYTES + block.numel()
        fitting = (slot for slot in self._slots if not slot[0] and slot.size >= length)
        slot = next(fitting, None)
        if slot is None:  # A new one replaces those that are free, but too small.
            slot = self._own.block(length).numpy()
            self._slots[:] = [*filter(_is_in_use, self._slots), slot]
        torch.from_numpy(slot[_HEADER_BYTES:length]).copy_(block)
        slot[0] = True
        offset = self._own.offset(torch.from_numpy(slot))
        return SlotAddress(self._own.address, offset, block.numel())


_left: list[Memory] = []
"""Slots in use whose writers do not exist any more."""


def _leave_to_readers(slots: list[Memory]) -> None:
    # The garbage collector may call this in the middle of anything.
    _left.extend(filter(_is_in_use, slots))


def _is_in_use(slot: Memory) -> bool:
    return bool(slot[0])


def read(address: SlotAddress) -> Tensor:
    """Return the block in another rank's slot, which is free when no tensor uses the block."""
    memory = open_arena(address.arena)
    assert memory is not None
    slot = memory[address.offset :]
    block = slot[_HEADER_BYTES : _HEADER_BYTES + address.size]
    # A tensor made from an array refers to the array as long as its storage is in use.
    weakref.finalize(block, _set_free, slot, os.getpid()).atexit = False
    return torch.from_numpy(block)


def _set_free(slot: Memory, reader: int) -> None:
    # In a forked process, such as a worker of a DataLoader, only a copy of the tensor is gone.
    if os.getpid() == reader:
        slot[0] = False


def shares_memory(comm: MPI.Comm, peer: int) -> bool:
    """Return whether this rank and rank ``peer`` can read each other's slots; called by both."""
    # The sender must not see that a slot is free before the receiver has read the block.
    own = arena() if memory_is_ordered() else None
    theirs = comm.sendrecv(None if own is None else own.address, peer, source=peer)
    readable = theirs is not None and open_arena(theirs) is not None
    return comm.sendrecv(readable, peer, source=peer) and readable
