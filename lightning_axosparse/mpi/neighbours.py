"""Neighbours: the stages of a pipeline connected, by what is found to serve each pair best."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from mpi4py import MPI

from lightning_axosparse.mpi.progress import Progress, progresses
from lightning_axosparse.mpi.shared import shares_memory
from lightning_axosparse.mpi.staging import Staging
from lightning_axosparse.mpi.transport import Mailbox
from lightning_axosparse.whereabouts import blocked


class Connection(NamedTuple):
    """What one stage knows of the ways to its neighbours.

    Attributes:
        comm: the ranks of its pipeline.
        shares: by neighbouring stage, whether it can be reached through shared memory.
        progress: enters MPI in this rank's place, where that helps.
    """

    comm: MPI.Comm
    shares: dict[int, bool]
    progress: Progress


def neighbours(
    stage: int, stages: int, replica: int, window: int, staging: Staging
) -> tuple[Mailbox | None, Mailbox | None]:
    """Connect one stage of one pipeline to its previous and next stage.

    The first call for a grid is collective over all ranks of the job, whose rank is
    ``replica * stages + stage``.

    Args:
        stage: of this rank.
        stages: number of stages.
        replica: of this rank.
        window: how many receives are posted ahead.
        staging: where blocks lie for MPI.
    """
    comm, shares, progress = connect(stages, replica, stage, staging.on_host)
    boxes = {
        neighbour: Mailbox(comm, neighbour, window, staging, shared, progress)
        for neighbour, shared in shares.items()
    }
    return boxes.get(stage - 1), boxes.get(stage + 1)


@cache  # An MPI has only so many communicators, and the probe takes its time.
def connect(stages: int, replica: int, stage: int, on_host: bool) -> Connection:
    """Find out, with all ranks of the job, how messages are to reach the neighbours.

    Args:
        stages: number of stages.
        replica: of this rank.
        stage: of this rank.
        on_host: whether blocks lie in host memory, which alone is shared.
    """
    world = MPI.COMM_WORLD
    with blocked("the other stages to connect"):
        comm = world.Split(replica, stage)
        beside = [other for other in (stage - 1, stage + 1) if 0 <= other < stages]
        shares = {other: on_host and shares_memory(comm, other) for other in beside}
        # Every other pair first, so that all pairs have been probed in two rounds.
        apart = sorted((n for n in beside if not shares[n]), key=lambda n: min(n, stage) % 2)
        probed = [progresses(comm, other) for other in apart]
        progress = Progress(comm)
        helps = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        if helps and not all(probed):
            progress.start()
        found = world.allgather((shares.get(stage + 1), all(probed)))
    pairs = [shared for shared, _ in found if shared is not None]
    rank_zero_info(finding(pairs, all(move for _, move in found), helps))
    return Connection(comm, shares, progress)


def finding(shares: list[bool], moves: bool, helps: bool) -> str:
    """Say how stages exchange messages.

    Args:
        shares: for each pair of neighbouring stages, whether they share memory.
        moves: whether MPI moves all others' messages while their senders compute.
        helps: whether a thread may enter MPI.
    """
    apart = shares.count(False)
    if not apart:
        return "All neighbouring stages exchange activations through shared memory."
    told = f"{apart} of {len(shares)} pairs of neighbouring stages do not share memory; there MPI "
    if moves:
        return told + "moves a message while its sender computes."
    told += "moves a large message only while its sender is inside MPI: "
    if helps:
        return told + "a thread of each such rank enters it at times."
    return told + (
        "stages will wait for one another. This MPI does not provide MPI_THREAD_MULTIPLE, with "
        "which a thread could help; see also its documentation on asynchronous progress."
    )
