"""Allocates memory that the other ranks of a node can read and write, and passes blocks in it.

An arena is an anonymous file (``memfd_create``) as long as the machine's memory; only the parts in
use take memory. Every other rank maps it once, and finds a block in it by its offset: mapping each
block would take longer than the all-reduce of its content.

A block is passed in a slot, a part of the sender's arena: the sender copies the block there and
sends the slot's address. Nothing else has to make progress, whatever the two ranks compute
meanwhile. The receiver uses the slot as the memory of a tensor, and the slot is free again when no
tensor uses it, even if the sender has stopped to use slots.
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

_HEADER_BYTES = 64  # the first says whether the slot is in use; the others align the block


def memory_is_ordered() -> bool:
    """Whether another process sees a write to shared memory after all that came before it here."""
    return platform.machine() in ("x86_64", "AMD64")


class Address(NamedTuple):
    """The path of an arena as other ranks see it, and its first bytes: another node has others."""

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
        """What another rank passes to :func:`opened`."""
        self.memory[:16] = np.frombuffer(self.address.token, np.uint8)
        self._free = [(_PAGE, size)]  # disjoint ranges, in order
        self._returned: deque[tuple[int, int]] = deque()

    def block(self, nbytes: int) -> Tensor:
        """Allocate bytes (1-D uint8); they are free again when no tensor uses them any more."""
        while self._returned:
            self._add_free(*self._returned.popleft())
        length = -(-nbytes // _PAGE) * _PAGE
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index] = (start + length, end)
                # The tensor's storage alone refers to this view of the memory.
                block = self.memory[start : start + nbytes]
                weakref.finalize(block, self._return, start, start + length).atexit = False
                return torch.from_numpy(block)
        raise MemoryError(
            f"No {nbytes / 2**20:.0f} MiB in one piece are left in shared memory." + see("grid")
        )

    def offset(self, tensor: Tensor) -> int:
        """The offset in bytes of a contiguous tensor; negative if it is not in this arena."""
        offset = tensor.data_ptr() - self.memory.ctypes.data
        return offset if offset < self.memory.size else -1

    def _return(self, start: int, end: int) -> None:
        # In a forked process, such as a worker of a DataLoader, only a view of the block is gone.
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
    """The arena of this process; None where the operating system does not allow one."""
    return _arena_of(os.getpid())


@cache  # One for each process, as others map it once; a forked process needs one of its own.
def _arena_of(process: int) -> Arena | None:
    try:
        return Arena()
    except (AttributeError, OSError):  # no memfd_create; a limit on address space
        return None


@cache  # A rank maps the arena of another once.
def opened(address: Address) -> Memory | None:
    """The memory of the arena of a rank, which may be this one; None if it is on another node."""
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
    """Allocates tensors in blocks that it uses again; on the CPU they are shared memory.

    Fresh memory costs a page fault every 4 KiB, which took longer than the all-reduce of what was
    written there. On other devices PyTorch's allocator keeps blocks itself.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor; its block is free again when no tensor uses its storage."""
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        nbytes = prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        free = self._free[nbytes]
        block = free.pop() if free else _new_block(nbytes)
        # The tensor's storage alone refers to this view of the block.
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
        if slot is None:  # A new one takes the place of those that are free, but too small.
            slot = self._own.block(length).numpy()
            self._slots[:] = [*filter(_is_in_use, self._slots), slot]
        torch.from_numpy(slot[_HEADER_BYTES:length]).copy_(block)
        slot[0] = True
        offset = self._own.offset(torch.from_numpy(slot))
        return SlotAddress(self._own.address, offset, block.numel())


_left: list[Memory] = []
"""Slots in use whose writers are gone."""


def _leave_to_readers(slots: list[Memory]) -> None:
    # The garbage collector may call this in the middle of anything.
    _left.extend(filter(_is_in_use, slots))


def _is_in_use(slot: Memory) -> bool:
    return bool(slot[0])


def read(address: SlotAddress) -> Tensor:
    """The block in a slot of another rank, which is free when no tensor uses the block any more."""
    memory = opened(address.arena)
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
    """Whether this rank and rank ``peer`` can read each other's slots; called by both."""
    # A slot says that it is free, so its sender must not see that before the block has been read.
    own = arena() if memory_is_ordered() else None
    theirs = comm.sendrecv(None if own is None else own.address, peer, source=peer)
    readable = theirs is not None and opened(theirs) is not None
    return comm.sendrecv(readable, peer, source=peer) and readable
