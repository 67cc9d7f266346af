"""Blocks: memory that is lent again once no tensor lives in it any more.

Fresh memory costs a page fault every 4 KiB, which took longer than the all-reduce of what was
written there. The other ranks of the node can read it where it lies.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from math import prod

import torch
from torch import Tensor

from lightning_axosparse.mpi.arena import arena


class Blocks:
    """Lends blocks of memory on the CPU; elsewhere PyTorch's allocator does the same."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def lend(self, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor; its block comes back when nothing shares its storage any more.

        Args:
            size: of the tensor.
            dtype: of the tensor.
            device: where it lies.
        """
        if device.type != "cpu":
            return torch.empty(size, dtype=dtype, device=device)
        nbytes = prod(size) * dtype.itemsize
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        free = self._free[nbytes]
        block = free.pop() if free else _fresh(nbytes)
        # The storage holds on to this view of the block and nobody else does.
        lent = block.numpy()
        weakref.finalize(lent, free.append, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(size)


def _fresh(nbytes: int) -> Tensor:
    shared = arena()
    return torch.empty(nbytes, dtype=torch.uint8) if shared is None else shared.block(nbytes)
