"""Converts tensors to buffers that MPI reads and writes: their own memory, or staged copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_axosparse.support.troubleshooting import see

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
_CONVERTED_TO = {torch.bool: torch.uint8, torch.complex32: torch.complex64}

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
# A bool is a byte, 0 or 1: the sum of 256 such bytes would be 0, which is false.
_OPERATIONS_ON_BOOL = {**_OPERATIONS, ReduceOp.SUM: MPI.MAX, ReduceOp.PRODUCT: MPI.MIN}


class ReduceOperation:
    """Stages tensors for an MPI reduction, and copies its results back.

    MPI works on the memory of a tensor where it can. A dtype that no MPI (bool, 8-bit floats) or
    not every MPI (float16, bfloat16) reduces is converted to a wider one, and the result is rounded
    once, at the end.
    """

    def __init__(self, reduce_op: Any, ranks: int) -> None:
        self._op = reduce_op.op
        self._factor = reduce_op.__getstate__()[1] if self._op == ReduceOp.PREMUL_SUM else None
        self._ranks = ranks

    def operation(self, dtype: torch.dtype) -> MPI.Op:
        """The MPI operation for tensors of ``dtype``."""
        if dtype == torch.bool and self._op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM):
            raise ValueError(
                f"A bool tensor cannot be reduced by {self._op}; convert it first." + see("logging")
            )
        return (_OPERATIONS_ON_BOOL if dtype == torch.bool else _OPERATIONS)[self._op]

    def stage(self, tensor: Tensor) -> Tensor:
        """What MPI reduces: ``tensor`` itself where possible, else a contiguous copy."""
        dtype = tensor.dtype
        if dtype not in _DATATYPES:
            dtype = _CONVERTED_TO.get(dtype, torch.float32)
        if self._factor is not None:
            tensor = tensor * self._factor
        return tensor.to(dtype).contiguous()

    def copy_back(self, staged: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy MPI's results from ``staged`` into ``targets``."""
        for result, target in zip(staged, targets, strict=True):
            if self._op == ReduceOp.AVG:
                exact = result.is_floating_point() or result.is_complex()
                result.copy_(result.div(self._ranks, rounding_mode=None if exact else "trunc"))
            copy_back(result, target)


def raw(tensor: Tensor, parts: Sequence[Tensor] | None = None) -> list[Any]:
    """The memory of a contiguous tensor as bytes, optionally split by the sizes of ``parts``."""
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if parts is None:
        return [memory, MPI.BYTE]
    return [memory, [part.nbytes for part in parts], MPI.BYTE]


def typed(tensor: Tensor) -> list[Any]:
    """The memory of a contiguous tensor as an MPI datatype that can be reduced."""
    return [MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes), _DATATYPES[tensor.dtype]]


def flat(parts: Sequence[Tensor]) -> Tensor:
    """A new 1-D tensor of all elements of ``parts``, in their order."""
    return torch.cat([part.reshape(-1) for part in parts])


def empty_for(parts: Sequence[Tensor]) -> Tensor:
    """A new uninitialized 1-D tensor of the size of all ``parts``."""
    return parts[0].new_empty(sum(part.numel() for part in parts))


def copy_back(staged: Tensor, target: Tensor) -> None:
    """Copy ``staged`` into ``target``, unless it is the same tensor."""
    if staged is not target:
        target.copy_(staged.view(target.shape))


def copy_all_back(staged: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each tensor of ``staged`` into the target at its index."""
    for source, target in zip(staged, targets, strict=True):
        copy_back(source, target)


def split_back(staged: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy the consecutive pieces of a 1-D tensor into ``targets``."""
    pieces = torch.split(staged, [target.numel() for target in targets])
    copy_all_back(pieces, targets)


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors in arbitrarily nested lists, in order."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from tensors_in(argument)


def detached(argument: Any) -> Any:
    """The same lists of tensors, detached from the autograd graph."""
    if isinstance(argument, Tensor):
        return argument.detach()
    return [detached(each) for each in argument] if isinstance(argument, list) else argument
