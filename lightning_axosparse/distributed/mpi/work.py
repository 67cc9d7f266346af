"""Represents an MPI operation under way, as torch.distributed's asynchronous calls return it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.distributed.backoff import BackOff
from lightning_axosparse.support.troubleshooting import see

_BULK = 2**26  # bytes; between sleeping ranks MPI may transfer only some hundred MB a second


class ProgressEngine(Protocol):
    """Executes operations that do not use MPI requests."""

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether there was anything to do."""


PROGRESS_ENGINES: WeakSet[ProgressEngine] = WeakSet()
"""All engines of this process. Every wait advances all of them, whatever it waits for: what it
waits for may come from a rank that first needs this rank's part in another operation."""


class MPIWork(dist.Work):
    """A collective or message under way.

    MPI makes progress inside its own calls only, so :meth:`is_completed` also makes progress on
    this operation and all others.

    Args:
        requests: the MPI requests that it consists of.
        result: the tensors that the operation fills.
        buffers: what MPI reads and writes, kept alive until the requests are done.
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
        """Set the description of the operation that messages about waits show."""
        self._description = description

    def keep_in(self, works: set[MPIWork]) -> None:
        """Add this to ``works`` until the operation is done."""
        self._kept_in = works
        works.add(self)

    def is_completed(self) -> bool:
        """Whether the operation is done; polls, never blocks."""
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
        """Same as :meth:`is_completed`: a failing MPI operation raises."""
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done, mostly asleep.

        Raises:
            RuntimeError: if ``timeout`` is given and passes before.
        """
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
        """A future with the result; waits for it, as MPI makes no progress in the background."""
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def result(self) -> list[Tensor]:
        """The tensors that the operation filled."""
        return self._result

    @property
    def _is_bulk(self) -> bool:
        return any(getattr(data, "nbytes", 0) >= _BULK for data in (*self._result, *self._buffers))

    def _has_arrived(self) -> bool:
        assert self._requests is not None
        return MPI.Request.Testall(self._requests, self._status)

    def _source_rank(self) -> int:
        return self._status[0].Get_source()
