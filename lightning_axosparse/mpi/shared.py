"""Shared memory: blocks that a neighbour on the same node reads where the sender has put them.

The sender copies a block into a slot and tells the neighbour which; nothing has to progress after
that, whatever either of them computes. The neighbour uses the slot as the tensor's own memory, and
the slot is free again when that tensor is gone. A slot is an anonymous file (``memfd_create``),
which no crash leaves behind, and grows to the largest block that it has carried.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADER_BYTES = 64  # the first says whether the slot is in use; blocks begin aligned
_Memory = NDArray[np.uint8]


class Place(NamedTuple):
    """Where a block lies, as the sender tells it.

    Attributes:
        path: of the slot's file, as any process of this user on the node sees it.
        size: bytes of the block.
    """

    path: str
    size: int


class _Slot:
    """A slot as its writer sees it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("axosparse")
        weakref.finalize(self, os.close, self._file)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._memory: _Memory = np.zeros(_HEADER_BYTES, np.uint8)

    @property
    def free(self) -> bool:
        return not self._memory[0]

    def fill(self, block: Tensor) -> Place:
        end = _HEADER_BYTES + block.numel()
        if end > self._memory.size:
            os.ftruncate(self._file, end)
            self._memory = _mapped(self._file)
        torch.from_numpy(self._memory[_HEADER_BYTES:end]).copy_(block)
        self._memory[0] = True
        return Place(self._path, block.numel())


class Outbox:
    """The slots that this rank fills and one neighbour reads."""

    def __init__(self) -> None:
        self._slots: list[_Slot] = []

    def put(self, block: Tensor) -> Place:
        """Copy a block (1-D uint8, CPU, not empty) into a free slot, or into a new one."""
        slot = next((slot for slot in self._slots if slot.free), None)
        if slot is None:
            slot = _Slot()
            self._slots.append(slot)
        return slot.fill(block)


class Inbox:
    """The neighbour's slots, as this rank reads them."""

    def __init__(self) -> None:
        self._memory: dict[str, _Memory] = {}

    def take(self, place: Place) -> Tensor:
        """The block at ``place``, in its slot, which is free when the tensor is gone.

        Raises:
            OSError: if this process cannot open the slot.
        """
        memory = self._memory.get(place.path)
        if memory is None or memory.size < _HEADER_BYTES + place.size:
            memory = self._memory[place.path] = _opened(place.path)
        block = memory[_HEADER_BYTES : _HEADER_BYTES + place.size]
        # A tensor made from an array holds the array for as long as its memory is in use.
        weakref.finalize(block, _set_free, memory, os.getpid()).atexit = False
        return torch.from_numpy(block)


def _set_free(memory: _Memory, reader: int) -> None:
    # A forked process, such as one that loads data, only loses its copy of the tensor.
    if os.getpid() == reader:
        memory[0] = False


def _mapped(file: int) -> _Memory:
    return np.frombuffer(mmap.mmap(file, 0), np.uint8)


def _opened(path: str) -> _Memory:
    file = os.open(path, os.O_RDWR)
    try:
        return _mapped(file)
    finally:
        os.close(file)


def shares_memory(comm: MPI.Comm, neighbour: int) -> bool:
    """Whether this rank and a neighbour can read each other's slots; called by both."""
    token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
    outbox = Outbox()
    offer = (outbox.put(token), token) if hasattr(os, "memfd_create") else None
    reads = _reads(comm.sendrecv(offer, neighbour, source=neighbour))
    return comm.sendrecv(reads, neighbour, source=neighbour) and reads


def _reads(offer: tuple[Place, Tensor] | None) -> bool:
    if offer is None:
        return False
    place, token = offer
    try:
        return torch.equal(Inbox().take(place), token)
    except (OSError, ValueError):  # On another node the path is another file, or none.
        return False
