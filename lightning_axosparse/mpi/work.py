"""Work: an MPI operation under way, as torch.distributed's asynchronous calls hand it out."""

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

from lightning_axosparse.backoff import BackOff

_BULK = 2**26  # bytes; MPI between sleeping ranks may move but some hundred megabytes a second


class Engine(Protocol):
    """Moves operations that MPI knows nothing of."""

    def advance(self) -> bool:
        """Do all that can be done without waiting; whether there was anything."""


ENGINES: WeakSet[Engine] = WeakSet()
"""All of them move on whatever a rank waits for: another may need this one's part first."""


class MPIWork(dist.Work):
    """A collective or message under way.

    MPI makes progress inside its own calls only, so :meth:`is_completed` also drives the work on,
    and with it every other.

    Args:
        requests: what MPI has been asked to do.
        result: the tensors that the operation fills.
        buffers: what MPI reads and writes, kept alive until the requests are done.
        finish: called once when they are, to hand staged results over.
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
        self._moved = False
        self._words = "an MPI operation"
        self._held_in: set[MPIWork] = set()
        self._status = [MPI.Status() for _ in requests]

    def call(self, words: str) -> None:
        """Take a name by which people know what is waited for."""
        self._words = words

    def hold_in(self, works: set[MPIWork]) -> None:
        """Be one of ``works`` until the operation is done."""
        self._held_in = works
        works.add(self)

    def is_completed(self) -> bool:
        """Whether the operation is done; polls, never blocks."""
        moved = [engine.advance() for engine in ENGINES]
        self._moved = any(moved)
        if self._requests is None:
            return True
        if not self._has_arrived():
            return False
        self._requests = None
        if self._finish is not None:
            self._finish()
        self._finish = None
        self._buffers.clear()
        self._held_in.discard(self)
        return True

    def is_success(self) -> bool:
        """Same as :meth:`is_completed`: a failing MPI operation raises."""
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Give the core up until the operation is done.

        Raises:
            RuntimeError: if ``timeout`` is given and passes first.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        with BackOff(lambda: self._words, self._is_bulk) as back_off:
            while not self.is_completed():
                if deadline is not None and time.monotonic() > deadline:
                    raise RuntimeError(f"{self._words} did not finish within {timeout}.")
                if self._moved:
                    back_off.reset()
                back_off.pause()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that holds the result; waits for it, as nothing drives MPI in the background."""
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
