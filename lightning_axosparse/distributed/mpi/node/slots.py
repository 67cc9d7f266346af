"""Passes blocks to another rank of the node through slots of shared memory.

The sender copies a block into a slot and sends the slot's path. Nothing else has to make progress,
whatever the two ranks compute meanwhile. The receiver uses the slot as the memory of a tensor, and
the slot is free again when no tensor uses it.

Each slot is an anonymous file of its own (``memfd_create``): the receiver may use it longer than
the sender keeps it, and no crash leaves it behind. It grows to the largest block it has carried.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.distributed.mpi.node.shared_memory import (
    Memory,
    mapped,
    memory_is_ordered,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADER_BYTES = 64  # the first says whether the slot is in use; the others align the block


class SlotAddress(NamedTuple):
    """Where a block is.

    Attributes:
        path: of the slot's file, as any process of this user on the node sees it.
        size: bytes of the block.
    """

    path: str
    size: int


class _Slot:
    """A slot as its sender sees it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("axosparse")
        weakref.finalize(self, os.close, self._file)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory: Memory = np.zeros(_HEADER_BYTES, np.uint8)

    @property
    def free(self) -> bool:
        return not self._memory[0]

    def fill(self, block: Tensor) -> SlotAddress:
        end = _HEADER_BYTES + block.numel()
        if end > self._memory.size:
            os.ftruncate(self._file, end)
            self._memory = np.frombuffer(mmap.mmap(self._file, 0), np.uint8)
        torch.from_numpy(self._memory[_HEADER_BYTES:end]).copy_(block)
        self._memory[0] = True
        return SlotAddress(self._path, block.numel())


class SlotWriter:
    """The slots that this rank fills and one other rank reads."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def write(self, block: Tensor) -> SlotAddress:
        """Copy a block (1-D uint8, CPU, not empty) into a free slot, or into a new one."""
        slot = next((slot for slot in self._slots if slot.free), None)
        if slot is None:
            slot = _Slot()
            self._slots.append(slot)
        return slot.fill(block)


class SlotReader:
    """The slots of another rank, as this rank reads them."""

    def __init__(self) -> None:
        self._memory: dict[str, Memory] = {}

    def read(self, address: SlotAddress) -> Tensor:
        """The block in its slot, which is free when no tensor uses the block any more.

        Raises:
            OSError: if this process cannot open the slot.
        """
        memory = self._memory.get(address.path)
        if memory is None or memory.size < _HEADER_BYTES + address.size:
            memory = self._memory[address.path] = mapped(address.path)
        block = memory[_HEADER_BYTES : _HEADER_BYTES + address.size]
        # A tensor made from an array refers to the array as long as its storage is in use.
        weakref.finalize(block, _set_free, memory, os.getpid()).atexit = False
        return torch.from_numpy(block)


def _set_free(memory: Memory, reader: int) -> None:
    # In a forked process, such as a worker of a DataLoader, only a copy of the tensor is gone.
    if os.getpid() == reader:
        memory[0] = False


def shares_memory(comm: MPI.Comm, peer: int) -> bool:
    """Whether this rank and rank ``peer`` can read each other's slots; called by both."""
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    writer = SlotWriter()
    # A slot says that it is free, so its sender must not see that before the block has been read.
    possible = hasattr(os, "memfd_create") and memory_is_ordered()
    mine = (writer.write(token), token) if possible else None
    readable = _is_readable(comm.sendrecv(mine, peer, source=peer))
    return comm.sendrecv(readable, peer, source=peer) and readable


def _is_readable(written: tuple[SlotAddress, Tensor] | None) -> bool:
    if written is None:
        return False
    address, token = written
    try:
        return torch.equal(SlotReader().read(address), token)
    except (OSError, ValueError):  # On another node the path is another file, or none.
        return False
