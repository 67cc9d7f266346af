"""Connects adjacent stages, in the way in which messages reach them best."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from lightning_axosparse.distributed.mpi.shared_memory import shares_memory
from lightning_axosparse.distributed.mpi.transport import Channel, ProgressThread, Staging
from lightning_axosparse.distributed.rank_status import BackOff, blocked
from lightning_axosparse.support.messages import rank_zero_info

_PROBE_SECONDS = 0.02  # during which the sender of the probe makes no call of MPI


class Connection(NamedTuple):
    """How one stage reaches the adjacent stages.

    Attributes:
        comm: the ranks of its pipeline.
        shares_memory: by adjacent stage, whether messages go through shared memory.
        progress: a thread that transfers messages, started where MPI does not.
    """

    comm: MPI.Comm
    shares_memory: dict[int, bool]
    progress: ProgressThread


def connect_stages(
    stage: int, stages: int, replica: int, window: int, staging: Staging
) -> tuple[Channel | None, Channel | None]:
    """Connect one stage of one pipeline to its previous and next stage; None where there is none.

    The first call for a grid is collective over all ranks of the job, whose rank is
    ``replica * stages + stage``. A channel posts ``window`` receives ahead.
    """
    comm, shares_memory, progress = connect(stages, replica, stage)
    channels = {
        adjacent: Channel(comm, adjacent, window, staging, shared, progress)
        for adjacent, shared in shares_memory.items()
    }
    return channels.get(stage - 1), channels.get(stage + 1)


@cache  # The number of communicators in an MPI is limited, and the test takes its time.
def connect(stages: int, replica: int, stage: int) -> Connection:
    """Find out, with all ranks of the job, how messages reach the adjacent stages best."""
    world = MPI.COMM_WORLD
    with blocked("the other stages to connect"):
        comm = world.Split(replica, stage)
        adjacent = [other for other in (stage - 1, stage + 1) if 0 <= other < stages]
        shared = {other: shares_memory(comm, other) for other in adjacent}
        # Every other pair first, so that two rounds test all pairs.
        by_mpi = sorted((n for n in adjacent if not shared[n]), key=lambda n: min(n, stage) % 2)
        progresses = [has_async_progress(comm, other) for other in by_mpi]
        thread = ProgressThread(comm)
        threads_allowed = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if threads_allowed and not all(progresses):
            thread.start()
        found = world.allgather((shared.get(stage + 1), all(progresses)))
    pairs = [shares for shares, _ in found if shares is not None]
    rank_zero_info(describe_connections(pairs, all(ok for _, ok in found), threads_allowed))
    return Connection(comm, shared, thread)


def describe_connections(shared: list[bool], progresses: bool, threads_allowed: bool) -> str:
    """Describe for the log how pairs of adjacent stages exchange messages."""
    apart = shared.count(False)
    if not apart:
        return "All adjacent stages exchange activations through shared memory."
    text = f"{apart} of {len(shared)} pairs of adjacent stages do not share memory; there MPI "
    if progresses:
        return text + "transfers a message while its sender computes."
    text += "transfers a large message only while its sender is inside MPI: "
    if threads_allowed:
        return text + "a thread of each such rank calls MPI at intervals."
    return text + (
        "stages will wait for one another. This MPI does not provide MPI_THREAD_MULTIPLE, with "
        "which a thread could help; see also its documentation on asynchronous progress."
    )


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
