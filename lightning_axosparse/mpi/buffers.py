"""What MPI reads and writes for a tensor: its memory, or a staged copy where that will not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

_DATATYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_CARRIED_AS = {torch.bool: torch.uint8, torch.complex32: torch.complex64}

_OPERATIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PREMUL_SUM: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
# A truth value is 0 or 1 in a byte: adding 256 of them as bytes would come out false.
_OPERATIONS_ON_BOOL = {**_OPERATIONS, ReduceOp.SUM: MPI.MAX, ReduceOp.PRODUCT: MPI.MIN}


class Reduction:
    """How tensors are made ready for an MPI reduction, and its results handed over.

    MPI works on the given memory where it can. A type that no MPI (bool, 8-bit floats) or not
    every MPI (float16, bfloat16) reduces goes as a wider one, so that it is rounded once, at the
    end.
    """

    def __init__(self, reduce_op: Any, ranks: int) -> None:
        self._op = reduce_op.op
        self._factor = reduce_op.__getstate__()[1] if self._op == ReduceOp.PREMUL_SUM else None
        self._ranks = ranks

    def operation(self, dtype: torch.dtype) -> MPI.Op:
        """The MPI operation for tensors of ``dtype``."""
        if dtype == torch.bool and self._op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            raise ValueError(f"A bool tensor cannot be reduced by {self._op}; convert it first.")
        return (_OPERATIONS_ON_BOOL if dtype == torch.bool else _OPERATIONS)[self._op]

    def stage(self, tensor: Tensor) -> Tensor:
        """What MPI is to reduce: ``tensor`` itself where possible, else a contiguous copy."""
        dtype = tensor.dtype
        if dtype not in _DATATYPES:
            dtype = _CARRIED_AS.get(dtype, torch.float32)
        if self._factor is not None:
            tensor = tensor * self._factor
        return tensor.to(dtype).contiguous()

    def deliver(self, staged: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Put what MPI left in ``staged`` into ``targets``."""
        for wire, target in zip(staged, targets, strict=True):
            if self._op == ReduceOp.AVG:
                exact = wire.is_floating_point() or wire.is_complex()
                wire.copy_(wire.div(self._ranks, rounding_mode=None if exact else "trunc"))
            hand_over(wire, target)


def raw(tensor: Tensor, parts: Sequence[Tensor] | None = None) -> list[Any]:
    """The memory of a contiguous tensor as bytes, optionally cut at the sizes of ``parts``."""
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if parts is None:
        return [memory, MPI.BYTE]
    return [memory, [part.nbytes for part in parts], MPI.BYTE]


def typed(tensor: Tensor) -> list[Any]:
    """The memory of a contiguous tensor as numbers that MPI can reduce."""
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), _DATATYPES[tensor.dtype]]


def flat(parts: Sequence[Tensor]) -> Tensor:
    """A new 1-D tensor of all elements of ``parts``, in their order."""
    return torch.cat([part.reshape(-1) for part in parts])


def empty_for(parts: Sequence[Tensor]) -> Tensor:
    """A new 1-D tensor with room for all elements of ``parts``."""
    return parts[0].new_empty(sum(part.numel() for part in parts))


def hand_over(staged: Tensor, target: Tensor) -> None:
    """Copy ``staged`` into ``target``, unless it is the same tensor."""
    if staged is not target:
        target.copy_(staged.view(target.shape))


def hand_all_over(staged: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """As :func:`hand_over`, one by one."""
    for wire, target in zip(staged, targets, strict=True):
        hand_over(wire, target)


def hand_out(staged: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a 1-D tensor piece by piece into ``targets``."""
    pieces = torch.split(staged, [target.numel() for target in targets])
    for piece, target in zip(pieces, targets, strict=True):
        hand_over(piece, target)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arbitrarily nested lists, in order."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from tensors_in(argument)


def detached(argument: Any) -> Any:
    """The same lists of tensors, without their history."""
    if isinstance(argument, Tensor):
        return argument.detach()
    return [detached(each) for each in argument] if isinstance(argument, list) else argument
