"""Summing: the all-reduce of large tensors among the ranks of one node, through shared memory.

A reduce-scatter and an all-gather without messages: every rank adds up its own piece of a tensor
from where the others have it, into its own, and copies the other pieces from where they have been
added up. A piece is added up once, by one rank, so that all ranks end with the same bits.

All ranks go through the tensors in one order. Each says on its board, which the others can read,
how many tensors it has offered, summed and taken: that is all they have to know of each other.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_axosparse.blocks import Blocks
from lightning_axosparse.mpi.arena import Address, Arena, Memory, arena, opened
from lightning_axosparse.mpi.buffers import hand_all_over
from lightning_axosparse.mpi.work import ENGINES, MPIWork

# A board tells that data have been written, so the data have to become visible before it does.
_STORES_IN_ORDER = ("x86_64", "AMD64")

# Sums of 16-bit numbers are rounded once, at the end.
_ADDED_AS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
_SMALLEST = 2**18  # bytes; smaller tensors take less time as messages
_IN_CACHE = 2**16  # elements that are added up over all ranks before the next ones

_OFFERED, _SUMMED, _TAKEN = range(3)  # cells of a board that count tensors
_FIRST_PLACE = 8  # cell from which on it says where they lie
_AHEAD = 504  # tensors that a rank may offer before all have taken the first


class Member(NamedTuple):
    """A rank of the group as this one sees it.

    Attributes:
        memory: its arena.
        board: its board, int64.
    """

    memory: Memory
    board: NDArray[np.int64]


class NodeSum:
    """The sums under way in one group; :func:`node_sum` makes it.

    Args:
        rank: this rank in the group.
        members: all ranks.
        own: the arena of this rank.
        board: the block of its board.
    """

    def __init__(self, rank: int, members: Sequence[Member], own: Arena, board: Tensor) -> None:
        self._rank, self._members, self._own = rank, members, own
        self._board, self._held = members[rank].board, board
        self._blocks = Blocks()
        self._started = 0
        self._wires: dict[int, Tensor] = {}
        ENGINES.add(self)

    def suits(self, tensors: Sequence[Tensor], reduce_op: Any) -> bool:
        """Whether this is the way to reduce these: large sums of floating point numbers."""
        large = all(t.dtype in _ADDED_AS and t.nbytes >= _SMALLEST for t in tensors)
        return large and reduce_op.op == ReduceOp.SUM

    def all_reduce(self, tensors: Sequence[Tensor]) -> MPIWork:
        """Sum each tensor over all ranks."""
        wires = [self._wire(tensor) for tensor in tensors]
        for wire in wires:
            self._wires[self._started] = wire.view(-1)
            self._started += 1
        self.advance()
        return _NodeSumWork(self, self._started, tensors, wires)

    def advance(self) -> bool:
        """Do all that does not have to wait for another rank; whether there was anything."""
        moved = False
        while self._wires and (self._take() or self._sum() or self._offer()):
            moved = True
        return moved

    def all_have_taken(self, count: int) -> bool:
        """Whether no rank needs the first ``count`` tensors any more."""
        return self._least(_TAKEN) >= count

    def _wire(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous() and self._own.offset(tensor) >= 0:
            return tensor
        # A power of two, so that there are not as many blocks as there are sizes.
        size = 1 << (tensor.numel() - 1).bit_length()
        block = self._blocks.lend((size,), tensor.dtype, tensor.device)
        return block[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def _offer(self) -> bool:
        number = int(self._board[_OFFERED])
        if number == self._started or number - self._least(_TAKEN) == _AHEAD:
            return False
        offset = self._own.offset(self._wires[number])
        self._board[_FIRST_PLACE + number % _AHEAD] = offset
        self._board[_OFFERED] = number + 1
        return True

    def _sum(self) -> bool:
        number = int(self._board[_SUMMED])
        if self._least(_OFFERED) == number:
            return False
        mine = self._piece(number, self._rank, self._rank).split(_IN_CACHE)
        theirs = [
            self._piece(number, self._rank, rank).split(_IN_CACHE)
            for rank in range(len(self._members))
            if rank != self._rank
        ]
        for target, *others in zip(mine, *theirs, strict=True):
            total = target.to(_ADDED_AS[target.dtype])
            for other in others:
                total.add_(other)
            if total is not target:
                target.copy_(total)
        self._board[_SUMMED] = number + 1
        return True

    def _take(self) -> bool:
        number = int(self._board[_TAKEN])
        if self._least(_SUMMED) == number:
            return False
        for rank in range(len(self._members)):
            if rank != self._rank:
                target = self._piece(number, rank, self._rank)
                target.copy_(self._piece(number, rank, rank))
        del self._wires[number]
        self._board[_TAKEN] = number + 1
        return True

    def _least(self, cell: int) -> int:
        return min(int(board[cell]) for _, board in self._members)

    def _piece(self, number: int, index: int, rank: int) -> Tensor:
        """The piece that rank ``index`` adds up, where ``rank`` has it."""
        wire, ranks = self._wires[number], len(self._members)
        start, end = (wire.numel() * cut // ranks * wire.itemsize for cut in (index, index + 1))
        memory, board = self._members[rank]
        place = int(board[_FIRST_PLACE + number % _AHEAD])
        return torch.from_numpy(memory[place + start : place + end]).view(wire.dtype)


class _NodeSumWork(MPIWork):
    def __init__(
        self, node: NodeSum, count: int, result: Sequence[Tensor], wires: Sequence[Tensor]
    ) -> None:
        super().__init__((), result, wires, lambda: hand_all_over(wires, result))
        self._node, self._count = node, count

    def _has_arrived(self) -> bool:
        return self._node.all_have_taken(self._count)


def node_sum(comm: MPI.Intracomm) -> NodeSum | None:
    """Connect the ranks of ``comm``, all of which call it; None if they share no memory."""
    own = arena() if platform.machine() in _STORES_IN_ORDER else None
    board = None if own is None else own.block(8 * (_FIRST_PLACE + _AHEAD)).zero_()
    offer = None if own is None or board is None else (own.address, own.offset(board))
    members = _members(comm.allgather(offer))
    if not all(comm.allgather(bool(members))):
        return None
    assert own is not None
    assert board is not None
    return NodeSum(comm.rank, members, own, board)


def _members(offers: Sequence[tuple[Address, int] | None]) -> list[Member]:
    members = []
    for offer in offers:
        if offer is None:
            return []
        address, board = offer
        try:
            memory = opened(address)
        except (OSError, ValueError):
            return []
        members.append(Member(memory, memory[board:][: 8 * (_FIRST_PLACE + _AHEAD)].view(np.int64)))
    return members
