"""Progress: whether MPI moves a large message while its sender computes, and a thread's help.

Most MPIs move the fragments of a large message inside their own calls only, unless the hardware or
the operating system copies for them (RDMA, cross-memory attach). A sender that computes for 30 ms
then holds its message back for 30 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from lightning_axosparse.backoff import BackOff

_BUSY = 0.02  # seconds for which the probe's sender keeps out of MPI
_SHORTEST, _LONGEST = 1e-4, 2e-3  # seconds between the thread's visits
_POKES = 50  # each moves a fragment or so
_NO_TAG = 9  # of no message


class Progress:
    """A thread that enters MPI in the place of its rank while batches are under way.

    Its visits are 0.1 ms apart after a message was sent, and grow to 2 ms, because they take time
    from what the rank computes. Without :meth:`start` there is no thread.

    Args:
        comm: any communicator; nothing is received from it.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._batches = 0
        self._pause = _SHORTEST
        self._under_way = threading.Event()

    def start(self) -> None:
        """Start the thread; MPI has to provide ``MPI_THREAD_MULTIPLE``."""
        threading.Thread(target=self._run, name="axosparse-progress", daemon=True).start()

    def begin(self) -> None:
        """Note that one more batch is under way."""
        self._batches += 1
        self._under_way.set()

    def stir(self) -> None:
        """Visit MPI soon."""
        self._pause = _SHORTEST

    def end(self) -> None:
        """Note that one batch is done."""
        self._batches -= 1
        if not self._batches:
            self._under_way.clear()

    def _run(self) -> None:
        while self._under_way.wait():
            time.sleep(self._pause)
            self._pause = min(_LONGEST, 1.5 * self._pause)
            for _ in range(_POKES):
                self._comm.Iprobe(tag=_NO_TAG)


def progresses(comm: MPI.Comm, neighbour: int) -> bool:
    """Whether a megabyte from the lower rank arrives while that rank keeps out of MPI.

    Called by both; takes some 20 ms.
    """
    large, back, answer = np.zeros(2**20, np.uint8), np.zeros(1), np.zeros(1, bool)
    _swap_nothing(comm, neighbour)
    if comm.rank < neighbour:
        requests = [comm.Isend(large, neighbour)]
        time.sleep(_BUSY)
        requests += [comm.Isend(back, neighbour), comm.Irecv(answer, neighbour)]
    else:
        arrival, return_ = comm.Irecv(large, neighbour), comm.Irecv(back, neighbour)
        _wait(lambda: arrival.Test() or return_.Test())
        answer[0] = not return_.Test()
        requests = [arrival, return_, comm.Isend(answer, neighbour)]
    _wait(lambda: MPI.Request.Testall(requests))
    return bool(answer[0])


def _swap_nothing(comm: MPI.Comm, neighbour: int) -> None:
    """Wait until both are here, and connected."""
    requests = [comm.Isend(np.zeros(0), neighbour), comm.Irecv(np.zeros(0), neighbour)]
    _wait(lambda: MPI.Request.Testall(requests))


def _wait(done: Callable[[], bool]) -> None:
    with BackOff(lambda: "a message that tries a neighbour's MPI out") as back_off:
        while not done():
            back_off.pause()
