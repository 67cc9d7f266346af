"""Tests whether MPI transfers a message while its sender computes, and helps with a thread.

Most MPIs transfer the fragments of a large message inside their own calls only, unless the hardware
or the operating system copies it (RDMA, cross-memory attach). A sender that computes for 30 ms then
delays its message by 30 ms.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from lightning_axosparse.distributed.backoff import BackOff

_PROBE_SECONDS = 0.02  # during which the sender of the probe makes no call of MPI
_MIN_PAUSE, _MAX_PAUSE = 1e-4, 2e-3  # seconds between two turns of the thread
_CALLS_PER_TURN = 50  # each transfers about one fragment
_UNUSED_TAG = 9


class ProgressThread:
    """A thread that calls MPI while batches are under way, so that it transfers messages.

    Its calls take time from what the rank computes: the pause between them is 0.1 ms after a
    message was sent, and grows to 2 ms. Without :meth:`start` there is no thread.

    Args:
        comm: any communicator; nothing is received from it.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._batches = 0
        self._pause = _MIN_PAUSE
        self._under_way = threading.Event()

    def start(self) -> None:
        """Start the thread; MPI has to provide ``MPI_THREAD_MULTIPLE``."""
        threading.Thread(target=self._run, name="axosparse-progress", daemon=True).start()

    def begin_batch(self) -> None:
        """Call MPI until :meth:`end_batch`; batches may overlap."""
        self._batches += 1
        self._under_way.set()

    def message_sent(self) -> None:
        """Call MPI at short intervals again."""
        self._pause = _MIN_PAUSE

    def end_batch(self) -> None:
        """End one batch."""
        self._batches -= 1
        if not self._batches:
            self._under_way.clear()

    def _run(self) -> None:
        while self._under_way.wait():
            time.sleep(self._pause)
            self._pause = min(_MAX_PAUSE, 1.5 * self._pause)
            for _ in range(_CALLS_PER_TURN):
                self._comm.Iprobe(tag=_UNUSED_TAG)


def has_async_progress(comm: MPI.Comm, peer: int) -> bool:
    """Whether a megabyte from the lower rank arrives while that rank makes no call of MPI.

    Called by this rank and rank ``peer``; takes some 20 ms.
    """
    large, small, answer = np.zeros(2**20, np.uint8), np.zeros(1), np.zeros(1, bool)
    _synchronize(comm, peer)
    if comm.rank < peer:
        requests = [comm.Isend(large, peer)]
        time.sleep(_PROBE_SECONDS)
        requests += [comm.Isend(small, peer), comm.Irecv(answer, peer)]
    else:
        # The small message leaves after the pause. The large one has arrived before it, or not.
        received, pause_over = comm.Irecv(large, peer), comm.Irecv(small, peer)
        _wait(lambda: received.Test() or pause_over.Test())
        answer[0] = not pause_over.Test()
        requests = [received, pause_over, comm.Isend(answer, peer)]
    _wait(lambda: MPI.Request.Testall(requests))
    return bool(answer[0])


def _synchronize(comm: MPI.Comm, peer: int) -> None:
    """Wait until both ranks are here and connected."""
    requests = [comm.Isend(np.zeros(0), peer), comm.Irecv(np.zeros(0), peer)]
    _wait(lambda: MPI.Request.Testall(requests))


def _wait(done: Callable[[], bool]) -> None:
    with BackOff(lambda: "a message that tests the MPI of the adjacent stage") as back_off:
        while not done():
            back_off.pause()
