"""All-reduces, all-gathers and exchanges tensors over the ranks of one node by shared memory.

An all-reduce is a reduce-scatter and an all-gather without messages: every rank sums its own piece
of a tensor over the memory of all ranks, and then copies each other piece from the rank that summed
it. As one rank sums a piece for all, all ranks end with the same bits. An all-gather is the second
half alone. In an exchange, each rank takes its pieces of what the others have published, of sizes
that it alone has to know.

All ranks process the tensors in the same order. Each has counters that the others can read: how
many tensors it has published, reduced and gathered. The ranks need no other synchronization.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_axosparse.distributed.mpi.shared_memory import (
    Address,
    Arena,
    BlockPool,
    Memory,
    arena,
    memory_is_ordered,
    opened,
)
from lightning_axosparse.distributed.mpi.work import PROGRESS_ENGINES, MPIWork, copy_all_back

# Sums of 16-bit numbers are rounded once, at the end.
_SUMMED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
MIN_BYTES = 2**18
"""MPI reduces smaller tensors in less time."""

CHUNK = 2**16
"""Elements that are summed over all ranks while they are in the cache."""

MAX_PENDING = 504
"""Tensors that a rank may publish before all ranks have gathered the first."""

_PUBLISHED, _REDUCED, _GATHERED = range(3)  # indices of the counters
_OFFSETS = 8  # index behind the counters, from which on the offsets of published tensors are


class Member(NamedTuple):
    """The arena of a rank of the group; its counters and the offsets of its tensors, int64."""

    memory: Memory
    counters: NDArray[np.int64]


class NodeCollectives:
    """The collectives under way in one group; :func:`node_collectives` creates it.

    The block with the counters of this rank is allocated as long as this object exists.
    """

    def __init__(self, rank: int, members: Sequence[Member], own: Arena, block: Tensor) -> None:
        self._rank, self._members, self._own = rank, members, own
        self._counters, self._block = members[rank].counters, block
        self._pool = BlockPool()
        self._started = 0
        self._pending: dict[int, Tensor] = {}
        self._gathered_only: set[int] = set()
        self._taken: dict[int, Sequence[Tensor]] = {}
        self._read_by_others: deque[tuple[int, Tensor]] = deque()
        PROGRESS_ENGINES.add(self)

    def suits(self, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
        """Whether these are to be reduced here: large sums of floating point numbers."""
        large = all(t.dtype in _SUMMED_AS and t.nbytes >= MIN_BYTES for t in tensors)
        return large and reduce_op.op == ReduceOp.SUM

    def all_reduce(self, tensors: Sequence[Tensor]) -> MPIWork:
        """Sum each tensor over all ranks."""
        shared = [self._in_arena(tensor) for tensor in tensors]
        for tensor, room in zip(tensors, shared, strict=True):
            if room is not tensor:
                room.copy_(tensor)
        return self._start(tensors, shared)

    def _start(self, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> MPIWork:
        self._publish_next(*shared)
        finish = partial(copy_all_back, shared, tensors)
        return _NodeWork(partial(self.is_done, self._started), tensors, shared, finish)

    def _publish_next(self, *shared: Tensor) -> None:
        for tensor in shared:
            self._pending[self._started] = tensor.view(-1)
            self._started += 1
        self.advance()

    def suits_gather(self, output: Tensor) -> bool:
        """Whether it is to be filled here: a large tensor of the other ranks' pieces."""
        return output.nbytes >= MIN_BYTES

    def all_gather(self, output: Tensor, source: Tensor) -> MPIWork:
        """Fill ``output`` with the tensors of all ranks, of which each may be its piece already."""
        shared = self._in_arena(output)
        piece = shared.view(-1)[self._rank * source.numel() :][: source.numel()]
        if piece.data_ptr() != source.data_ptr():
            piece.copy_(source.reshape(-1))
        self._gathered_only.add(self._started)
        return self._start([output], [shared])

    def exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> MPIWork:
        """Fill the r-th output with the tensor that rank r has for this rank.

        Args:
            outputs: of the size and dtype of what each rank has.
            inputs: one for each rank; or a single one, for all of them.
        """
        while self._read_by_others and self.is_done(self._read_by_others[0][0]):
            self._read_by_others.popleft()
        ranks, sizes = len(self._members), [each.nbytes for each in inputs]
        head = -(-ranks // 2) * 16  # Where pieces lie for each rank; numbers of 16 bytes follow.
        ends = [*accumulate(sizes, initial=head)]
        shared = self._room((ends[-1],), torch.uint8)
        shared[: 8 * ranks].view(torch.int64).copy_(
            torch.tensor(ends[:-1] if len(inputs) > 1 else ends[:1] * ranks)
        )
        for piece, each in zip(shared[head:].split(sizes), inputs, strict=True):
            piece.view(each.dtype).view(each.shape).copy_(each)
        self._gathered_only.add(self._started)
        self._taken[self._started] = outputs
        self._publish_next(shared)
        self._read_by_others.append((self._started, shared))
        # What this rank has taken is its own, whatever the others have taken.
        return _NodeWork(partial(self._has_gathered, self._started), outputs, [shared])

    def advance(self) -> bool:
        """Do what need not wait for another rank; return whether there was anything to do."""
        moved = False
        while self._pending and (self._gather() or self._reduce() or self._publish()):
            moved = True
        return moved

    def is_done(self, count: int) -> bool:
        """Whether all ranks have gathered the first ``count`` tensors."""
        return self._least(_GATHERED) >= count

    def _has_gathered(self, count: int) -> bool:
        return int(self._counters[_GATHERED]) >= count

    def _in_arena(self, tensor: Tensor) -> Tensor:
        """Return a tensor, or one of its shape, in memory that the other ranks can read."""
        if tensor.is_contiguous() and self._own.offset(tensor) >= 0:
            return tensor
        return self._room(tensor.shape, tensor.dtype)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Sizes that are powers of two keep the number of different blocks small.
        size = 1 << (prod(shape) - 1).bit_length()
        block = self._pool.empty((size,), dtype, torch.device("cpu"))
        return block[: prod(shape)].view(*shape)

    def _publish(self) -> bool:
        number = int(self._counters[_PUBLISHED])
        if number == self._started or number - self._least(_GATHERED) == MAX_PENDING:
            return False
        offset = self._own.offset(self._pending[number])
        self._counters[_OFFSETS + number % MAX_PENDING] = offset
        self._counters[_PUBLISHED] = number + 1
        return True

    def _reduce(self) -> bool:
        number = int(self._counters[_REDUCED])
        if self._least(_PUBLISHED) == number:
            return False
        if number not in self._gathered_only:
            self._sum(number)
        self._counters[_REDUCED] = number + 1
        return True

    def _sum(self, number: int) -> None:
        mine = self._piece(number, self._rank, self._rank).split(CHUNK)
        theirs = [
            self._piece(number, self._rank, rank).split(CHUNK)
            for rank in range(len(self._members))
            if rank != self._rank
        ]
        for target, *others in zip(mine, *theirs, strict=True):
            total = target.to(_SUMMED_AS[target.dtype])
            for other in others:
                total.add_(other)
            if total is not target:
                target.copy_(total)

    def _gather(self) -> bool:
        number = int(self._counters[_GATHERED])
        only = number in self._gathered_only
        # This rank has reduced once all have published.
        ready = int(self._counters[_REDUCED]) if only else self._least(_REDUCED)
        if ready <= number:
            return False
        self._gathered_only.discard(number)
        if number in self._taken:
            for rank, target in enumerate(self._taken.pop(number)):
                self._take(number, rank, target)
        else:
            for rank in range(len(self._members)):
                if rank != self._rank:
                    target = self._piece(number, rank, self._rank)
                    target.copy_(self._piece(number, rank, rank))
        del self._pending[number]
        self._counters[_GATHERED] = number + 1
        return True

    def _take(self, number: int, rank: int, target: Tensor) -> None:
        """Copy what a rank has published for this one."""
        memory, counters = self._members[rank]
        published = memory[int(counters[_OFFSETS + number % MAX_PENDING]) :]
        start = int(published[8 * self._rank :][:8].view(np.int64)[0])
        block = torch.from_numpy(published[start : start + target.nbytes])
        if len(block):
            target.copy_(block.view(target.dtype).view(target.shape))

    def _least(self, counter: int) -> int:
        return min(int(counters[counter]) for _, counters in self._members)

    def _piece(self, number: int, index: int, rank: int) -> Tensor:
        """The piece of a tensor that rank ``index`` sums, in the memory of ``rank``."""
        tensor, ranks = self._pending[number], len(self._members)
        start, end = (tensor.numel() * cut // ranks * tensor.itemsize for cut in (index, index + 1))
        memory, counters = self._members[rank]
        offset = int(counters[_OFFSETS + number % MAX_PENDING])
        return torch.from_numpy(memory[offset + start : offset + end]).view(tensor.dtype)


class _NodeWork(MPIWork):
    def __init__(self, arrived: Callable[[], bool], *what: Any) -> None:
        super().__init__((), *what)
        self._arrived = arrived

    def _has_arrived(self) -> bool:
        return self._arrived()


def node_collectives(comm: MPI.Intracomm) -> NodeCollectives | None:
    """Connect the ranks of ``comm``, all of which call it; None if they share no memory."""
    # A counter says that data have been written, so other ranks must not see it before the data.
    own = arena() if memory_is_ordered() else None
    block = None if own is None else own.block(8 * (_OFFSETS + MAX_PENDING)).zero_()
    mine = None if own is None or block is None else (own.address, own.offset(block))
    members = _members(comm.allgather(mine))
    if not all(comm.allgather(bool(members))):
        return None
    assert own is not None
    assert block is not None
    return NodeCollectives(comm.rank, members, own, block)


def _members(addresses: Sequence[tuple[Address, int] | None]) -> list[Member]:
    """All ranks, by the arenas and offsets of their counters; none if one cannot be read."""
    members = []
    for entry in addresses:
        if entry is None:
            return []
        address, offset = entry
        try:
            memory = opened(address)
        except (OSError, ValueError):
            return []
        counters = memory[offset:][: 8 * (_OFFSETS + MAX_PENDING)].view(np.int64)
        members.append(Member(memory, counters))
    return members
