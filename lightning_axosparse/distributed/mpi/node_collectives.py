"""All-reduces and exchanges tensors over the ranks of one node by shared memory.

An all-reduce is a reduce-scatter and an all-gather without messages: every rank sums its own piece
of a tensor over the memory of all ranks, and then copies each other piece from the rank that summed
it. A rank that needs only some parts of the sum sums these, and copies nothing. Ranks are added in
their order, so a sum has the same bits whichever rank computes it. In an exchange, each rank copies
the pieces that the others have published for it; only the receiver has to know their sizes.

All ranks process the tensors in the same order. Each has counters that the others can read: the
numbers of tensors that it has published, reduced and gathered. There is no other synchronization: a
rank may reduce tensor 5, for example, as soon as all ranks have published 6 tensors.
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
    open_arena,
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
"""MPI is faster for smaller tensors."""

CHUNK = 2**16
"""Elements that are summed over all ranks while they are in the cache."""

MAX_PENDING = 504
"""Tensors that a rank may publish before all ranks have gathered the first."""

_PUBLISHED, _REDUCED, _GATHERED = range(3)  # Indices of the counters.
_OFFSETS = 8  # Index of the first offset of a published tensor, behind the counters.


class Member(NamedTuple):
    """The arena of a rank of the group; its counters and the offsets of its tensors, int64."""

    memory: Memory
    counters: NDArray[np.int64]


class _Operation(NamedTuple):
    """A tensor, and two functions that are called with its number.

    Attributes:
        tensor: the tensor that this rank publishes, 1-D.
        reduce: called once all ranks have published their tensors.
        gather: called once all have reduced; None if nothing is left to do then.
    """

    tensor: Tensor
    reduce: Callable[[int], None]
    gather: Callable[[int], None] | None = None


class NodeCollectives:
    """The collectives of one group; :func:`node_collectives` creates it.

    This object keeps the block with the counters of this rank allocated.
    """

    def __init__(self, rank: int, members: Sequence[Member], own: Arena, block: Tensor) -> None:
        self._rank, self._members, self._own = rank, members, own
        self._counters, self._block = members[rank].counters, block
        self._pool = BlockPool()
        self._started = 0
        self._pending: dict[int, _Operation] = {}
        self._read_by_others: deque[tuple[int, Tensor]] = deque()
        PROGRESS_ENGINES.add(self)

    def suits(self, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
        """Return whether tensors should be reduced here: large sums of floating point numbers."""
        are_large = all(t.dtype in _SUMMED_AS and t.nbytes >= MIN_BYTES for t in tensors)
        return are_large and reduce_op.op == ReduceOp.SUM

    def all_reduce(self, tensors: Sequence[Tensor]) -> MPIWork:
        """Sum each tensor over all ranks."""
        shared = [self._in_arena(tensor) for tensor in tensors]
        for tensor, published in zip(tensors, shared, strict=True):
            if published is not tensor:
                published.copy_(tensor)
            self._start(_Operation(published.view(-1), self._sum_piece, self._copy_pieces))
        finish = partial(copy_all_back, shared, tensors)
        return _NodeWork(partial(self.is_done, self._started), tensors, shared, finish)

    def reduce_parts(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], tensor: Tensor
    ) -> MPIWork:
        """Sum some parts of a tensor over all ranks; each rank may need different parts.

        Args:
            outputs: 1-D tensors for the sums.
            parts: for each output, the part of ``tensor`` to sum, as a view.
            tensor: contiguous. It must not change, as other ranks may read it later than this one.
        """
        shared = self._in_arena(tensor)
        if shared is not tensor:
            shared.copy_(tensor)
        starts = [int(part.storage_offset() - tensor.storage_offset()) for part in parts]

        def reduce(number: int) -> None:
            for start, output in zip(starts, outputs, strict=True):
                self._sum(number, start, output)

        return self._start_reading(_Operation(shared.view(-1), reduce), outputs)

    def exchange(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Sequence[Tensor]]
    ) -> MPIWork:
        """Send tensors to each rank, and receive tensors from each rank.

        Args:
            outputs: for each rank, tensors for the values that it sends, all of one dtype.
            inputs: for each rank, tensors of that dtype to send; or a single list, for all ranks.
        """
        ranks, sizes = len(self._members), [sum(t.nbytes for t in each) for each in inputs]
        # First the offset of each rank's piece, rounded up to 16 bytes, to align the pieces.
        head = -(-ranks // 2) * 16
        ends = [*accumulate(sizes, initial=head)]
        shared = self._room((ends[-1],), torch.uint8)
        shared[: 8 * ranks].view(torch.int64).copy_(
            torch.tensor(ends[:-1] if len(inputs) > 1 else ends[:1] * ranks)
        )
        for piece, each in zip(shared[head:].split(sizes), inputs, strict=True):
            if len(piece):
                torch.cat([tensor.reshape(-1) for tensor in each], out=piece.view(each[0].dtype))
        own = inputs[self._rank] if len(inputs) > 1 else inputs[0]
        for output, tensor in zip(outputs[self._rank], own, strict=True):
            if not output.is_set_to(tensor):
                output.copy_(tensor)

        def take(number: int) -> None:
            for rank, targets in enumerate(outputs):
                if rank != self._rank and targets:
                    self._take(number, rank, targets)

        return self._start_reading(_Operation(shared, take), [t for each in outputs for t in each])

    def _start_reading(self, operation: _Operation, outputs: Sequence[Tensor]) -> MPIWork:
        """Start an operation that is done on this rank once it has read the others' tensors.

        Others may still read this rank's tensor, which stays allocated until they have.
        """
        while self._read_by_others and self.is_done(self._read_by_others[0][0]):
            self._read_by_others.popleft()
        self._start(operation)
        self._read_by_others.append((self._started, operation.tensor))
        return _NodeWork(partial(self._has_gathered, self._started), outputs, [operation.tensor])

    def _start(self, operation: _Operation) -> None:
        self._pending[self._started] = operation
        self._started += 1
        self.advance()

    def advance(self) -> bool:
        """Do all that is possible without waiting; return whether anything was done."""
        moved = False
        while self._pending and (self._gather() or self._reduce() or self._publish()):
            moved = True
        return moved

    def is_done(self, count: int) -> bool:
        """Return whether all ranks have gathered the first ``count`` tensors."""
        return self._least(_GATHERED) >= count

    def _has_gathered(self, count: int) -> bool:
        return int(self._counters[_GATHERED]) >= count

    def _in_arena(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` if other ranks can read its memory; else a new one of its shape."""
        if tensor.is_contiguous() and self._own.offset(tensor) >= 0:
            return tensor
        return self._room(tensor.shape, tensor.dtype)

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Powers of two, so that there are few different sizes of blocks.
        size = 1 << (prod(shape) - 1).bit_length()
        block = self._pool.empty((size,), dtype, torch.device("cpu"))
        return block[: prod(shape)].view(*shape)

    def _publish(self) -> bool:
        number = int(self._counters[_PUBLISHED])
        if number == self._started or number - self._least(_GATHERED) == MAX_PENDING:
            return False
        offset = self._own.offset(self._pending[number].tensor)
        self._counters[_OFFSETS + number % MAX_PENDING] = offset
        self._counters[_PUBLISHED] = number + 1
        return True

    def _reduce(self) -> bool:
        number = int(self._counters[_REDUCED])
        if self._least(_PUBLISHED) == number:
            return False
        self._pending[number].reduce(number)
        self._counters[_REDUCED] = number + 1
        return True

    def _gather(self) -> bool:
        number = int(self._counters[_GATHERED])
        gather = self._pending[number].gather
        ready = int(self._counters[_REDUCED]) if gather is None else self._least(_REDUCED)
        if ready <= number:
            return False
        if gather is not None:
            gather(number)
        del self._pending[number]
        self._counters[_GATHERED] = number + 1
        return True

    def _sum_piece(self, number: int) -> None:
        """Sum this rank's piece of a tensor, in place."""
        tensor = self._pending[number].tensor
        start, end = self._piece_of(self._rank, tensor)
        self._sum(number, start, tensor[start:end])

    def _sum(self, number: int, start: int, output: Tensor) -> None:
        """Sum elements of a tensor, from ``start`` on, over all ranks; ``output`` may be these."""
        every = [
            self._read(number, rank, start * output.itemsize, output).split(CHUNK)
            for rank in range(len(self._members))
        ]
        for target, first, *others in zip(output.split(CHUNK), *every, strict=True):
            total = first.to(_SUMMED_AS[target.dtype])
            for other in others:
                total = torch.add(total, other, out=target if other is others[-1] else None)
            if not others:
                target.copy_(total)

    def _copy_pieces(self, number: int) -> None:
        """Copy the pieces of a tensor that the other ranks have summed."""
        tensor = self._pending[number].tensor
        for rank in range(len(self._members)):
            if rank != self._rank:
                start, end = self._piece_of(rank, tensor)
                piece = tensor[start:end]
                piece.copy_(self._read(number, rank, start * tensor.itemsize, piece))

    def _take(self, number: int, rank: int, targets: Sequence[Tensor]) -> None:
        """Copy the tensors that a rank has published for this one."""
        start = int(self._read(number, rank, 8 * self._rank, torch.empty(1, dtype=torch.int64)))
        for target in targets:
            target.copy_(self._read(number, rank, start, target).view(target.shape))
            start += target.nbytes

    def _read(self, number: int, rank: int, start: int, like: Tensor) -> Tensor:
        """Return as many elements as ``like`` has, from byte ``start`` of a rank's tensor."""
        memory, counters = self._members[rank]
        start += int(counters[_OFFSETS + number % MAX_PENDING])
        return torch.from_numpy(memory[start : start + like.nbytes]).view(like.dtype)

    def _piece_of(self, rank: int, tensor: Tensor) -> tuple[int, int]:
        """Return the range of elements that a rank sums for all."""
        ranks = len(self._members)
        return tensor.numel() * rank // ranks, tensor.numel() * (rank + 1) // ranks

    def _least(self, counter: int) -> int:
        return min(int(counters[counter]) for _, counters in self._members)


class _NodeWork(MPIWork):
    def __init__(self, arrived: Callable[[], bool], *what: Any) -> None:
        super().__init__((), *what)
        self._arrived = arrived

    def _has_arrived(self) -> bool:
        if self._arrived():
            return True
        # The rank that is waited for may need a message of this one, which MPI sends inside calls.
        MPI.COMM_WORLD.Iprobe()
        return False


def node_collectives(comm: MPI.Intracomm) -> NodeCollectives | None:
    """Connect the ranks of ``comm``; collective. Return None if they share no memory."""
    # A counter means that data have been written, so other ranks must not see it before the data.
    own = arena() if memory_is_ordered() else None
    block = None if own is None else own.block(8 * (_OFFSETS + MAX_PENDING)).zero_()
    address = None if own is None or block is None else (own.address, own.offset(block))
    members = _members(comm.allgather(address))
    if not all(comm.allgather(bool(members))):
        return None
    assert own is not None
    assert block is not None
    return NodeCollectives(comm.rank, members, own, block)


def _members(addresses: Sequence[tuple[Address, int] | None]) -> list[Member]:
    """Return all ranks, from the addresses of their counters; none if one cannot be read."""
    members = []
    for entry in addresses:
        memory = None if entry is None else open_arena(entry[0])
        if entry is None or memory is None:
            return []
        offset = entry[1]
        counters = memory[offset:][: 8 * (_OFFSETS + MAX_PENDING)].view(np.int64)
        members.append(Member(memory, counters))
    return members
