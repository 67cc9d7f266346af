"""MPI operations as torch's ``Work``, and buffers of tensors that MPI reads and writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_axosparse.distributed.rank_status import BackOff
from lightning_axosparse.support.troubleshooting import see

_REDUCED = {
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}
"""The dtypes that every MPI reduces."""
_CONVERTED_TO = {torch.bool: torch.uint8, torch.complex32: torch.complex64}

_OPERATIONS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVG: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
}
# A bool is a byte, 0 or 1: the sum of 256 such bytes would be 0, which is false.
_OPERATIONS_ON_BOOL = {**_OPERATIONS, ReduceOp.SUM: MPI.MAX, ReduceOp.PRODUCT: MPI.MIN}

_BULK = 2**26  # Bytes; between sleeping ranks MPI may transfer only some hundred MB a second.


class ReduceOperation:
    """Stages tensors for an MPI reduction, and copies its results back.

    MPI works on the memory of the tensor if it can. A dtype that no MPI (bool, 8-bit floats) or
    not every MPI (float16, bfloat16) reduces is converted to a wider one, and the result is rounded
    once, at the end.
    """

    def __init__(self, reduce_op: Any, ranks: int) -> None:
        self._op = reduce_op.op
        self._ranks = ranks

    def operation(self, dtype: torch.dtype) -> MPI.Op:
        """Return the MPI operation for tensors of ``dtype``."""
        if dtype == torch.bool and self._op == ReduceOp.AVG:
            raise ValueError(
                f"A bool tensor cannot be reduced by {self._op}; convert it first." + see("logging")
            )
        return (_OPERATIONS_ON_BOOL if dtype == torch.bool else _OPERATIONS)[self._op]

    def stage(self, tensor: Tensor) -> Tensor:
        """Return the tensor that MPI reduces: ``tensor`` if possible, else a contiguous copy."""
        dtype = tensor.dtype
        if dtype not in _REDUCED:
            dtype = _CONVERTED_TO.get(dtype, torch.float32)
        return tensor.to(dtype).contiguous()

    def copy_back(self, staged: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy MPI's results from ``staged`` into ``targets``."""
        for result, target in zip(staged, targets, strict=True):
            if self._op == ReduceOp.AVG:
                exact = result.is_floating_point() or result.is_complex()
                result.copy_(result.div(self._ranks, rounding_mode=None if exact else "trunc"))
            copy_back(result, target)


def raw(tensor: Tensor, parts: Sequence[Tensor] | None = None) -> list[Any]:
    """Return a contiguous tensor as a buffer for MPI, split by the sizes of ``parts`` if given."""
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    if parts is None:
        return [memory, MPI.BYTE]
    return [memory, [part.nbytes for part in parts], MPI.BYTE]


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Return a new 1-D tensor of all elements of ``parts``, in their order."""
    return torch.cat([part.reshape(-1) for part in parts])


def empty_for(parts: Sequence[Tensor]) -> Tensor:
    """Return a new uninitialized 1-D tensor of the size of all ``parts``."""
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


PROGRESS_ENGINES: WeakSet[Any] = WeakSet()
"""Objects that run operations without MPI requests. Their method ``advance`` does all that is
possible without waiting, and returns whether it did anything. Every wait calls it for all objects,
as the awaited rank may first need this rank's part in another operation."""


class MPIWork(dist.Work):
    """A collective or message that has started.

    MPI makes progress only inside its own calls, so :meth:`is_completed` also makes progress on
    this operation and all others.

    Args:
        requests: the MPI requests of the operation.
        result: the tensors that the operation fills.
        buffers: the buffers that MPI reads and writes, kept alive until the requests are done.
        finish: called once when they are, to copy staged results into ``result``.
    """

    def __init__(
        self,
        requests: Sequence[MPI.Request],
        result: Sequence[Tensor] = (),
        buffers: Iterable[Any] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._requests: list[MPI.Request] | None = list(requests)
        self._result = list(result)
        self._buffers = list(buffers)
        self._finish = finish
        self._advanced = False
        self._description = "an MPI operation"
        self._kept_in: set[MPIWork] = set()
        self._status = [MPI.Status() for _ in requests]

    def describe(self, description: str) -> None:
        """Set the description of the operation in messages about waits."""
        self._description = description

    def keep_in(self, works: set[MPIWork]) -> None:
        """Add this to ``works`` until the operation is done, if it is not yet."""
        if self._requests is not None:
            self._kept_in = works
            works.add(self)

    def is_completed(self) -> bool:
        """Return whether the operation is done; polls, never blocks."""
        advanced = [engine.advance() for engine in PROGRESS_ENGINES]
        self._advanced = any(advanced)
        if self._requests is None:
            return True
        if not self._has_arrived():
            return False
        self._requests = None
        if self._finish is not None:
            self._finish()
        self._finish = None
        self._buffers.clear()
        self._kept_in.discard(self)
        return True

    def is_success(self) -> bool:
        """Do the same as :meth:`is_completed`, as a failing MPI operation raises."""
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done, mostly asleep, or raise after ``timeout``."""
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        with BackOff(lambda: self._description, self._is_bulk) as back_off:
            while not self.is_completed():
                if deadline is not None and time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{self._description} did not finish within {timeout}."
                        + see("failing-and-waiting-ranks")
                    )
                if self._advanced:
                    back_off.reset()
                back_off.pause()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Wait, as MPI makes no progress in the background, and return a future with the result."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation fills."""
        return self._result

    @property
    def _is_bulk(self) -> bool:
        return any(getattr(data, "nbytes", 0) >= _BULK for data in (*self._result, *self._buffers))

    def _has_arrived(self) -> bool:
        assert self._requests is not None
        return MPI.Request.Testall(self._requests, self._status)

    def _source_rank(self) -> int:
        return self._status[0].Get_source()


class ChainedWork(dist.Work):
    """A collective, and a function that is called once it is done.

    Args:
        work: the collective.
        finish: called once, by the first :meth:`wait`.
    """

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish = work, finish

    def is_completed(self) -> bool:
        """Return whether the collective is done."""
        return self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective is done, and call the function."""
        self._work.wait(*() if timeout is None else (timeout,))
        finish, self._finish = self._finish, lambda: None
        finish()
        return True
