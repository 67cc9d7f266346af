from typing import Any

import pytest

from tests.ranks import run_ranks


def connect_and_probe() -> Any:
    from mpi4py import MPI

    from lightning_axosparse.mpi.neighbours import connect, finding
    from lightning_axosparse.mpi.progress import Progress, progresses
    from lightning_axosparse.mpi.shared import shares_memory

    world = MPI.COMM_WORLD
    shared = connect(2, 0, world.rank, True).shares
    apart = connect(2, 0, world.rank, False).shares
    alone = progresses(world, 1 - world.rank)
    progress = Progress(world)
    progress.start()
    progress.begin()
    helped = [progresses(world, 1 - world.rank) for _ in range(5)]
    progress.end()
    found = shares_memory(world, 1 - world.rank), shared, apart, alone, any(helped)
    told = [
        finding([True, True], True, True),
        finding([True, False, False], True, True),
        finding([False], False, True),
        finding([False], False, False),
    ]
    return found, told


def test_a_thread_moves_what_mpi_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cross-memory attach MPICH moves a large message in its own calls alone."""
    monkeypatch.setenv("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    (first, told), (second, _) = run_ranks(2, connect_and_probe)
    assert first == (True, {1: True}, {1: False}, False, True)
    assert second == (True, {0: True}, {0: False}, False, True)
    assert told[0] == "All neighbouring stages exchange activations through shared memory."
    assert "2 of 3 pairs" in told[1]
    assert told[1].endswith("MPI moves a message while its sender computes.")
    assert "only while its sender is inside MPI: a thread" in told[2]
    assert "does not provide MPI_THREAD_MULTIPLE" in told[3]
