"""Adjacent stages connect in the way in which messages reach them best."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from lightning_axosparse.distributed.mpi.connection import describe_connections
from tests.ranks import run_ranks


def connect_and_probe() -> Any:
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi import connection
    from lightning_axosparse.distributed.mpi.connection import connect, has_async_progress
    from lightning_axosparse.distributed.mpi.shared_memory import shares_memory
    from lightning_axosparse.distributed.mpi.transport import ProgressThread

    world = MPI.COMM_WORLD
    shared = connect(2, 0, world.rank).shares_memory
    connect.cache_clear()
    with patch.object(connection, "shares_memory", return_value=False):
        apart = connect(2, 0, world.rank).shares_memory
    alone = has_async_progress(world, 1 - world.rank)
    progress = ProgressThread(world)
    progress.start()
    progress.begin_batch()
    helped = [has_async_progress(world, 1 - world.rank) for _ in range(5)]
    progress.end_batch()
    return shares_memory(world, 1 - world.rank), shared, apart, alone, any(helped)


def test_a_thread_makes_progress_where_mpi_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cross-memory attach MPICH transfers large messages in its own calls only."""
    monkeypatch.setenv("MPIR_CVAR_CH4_CMA_ENABLE", "0")
    first, second = run_ranks(2, connect_and_probe)
    assert first == (True, {1: True}, {1: False}, False, True)
    assert second == (True, {0: True}, {0: False}, False, True)


def test_the_log_says_how_adjacent_stages_exchange_messages() -> None:
    said = describe_connections([True, True], True, True)
    assert said == "All adjacent stages exchange activations through shared memory."
    said = describe_connections([True, False, False], True, True)
    assert "2 of 3 pairs" in said
    assert said.endswith("MPI transfers a message while its sender computes.")
    said = describe_connections([False], False, True)
    assert "only while its sender is inside MPI: a thread" in said
    said = describe_connections([False], False, False)
    assert "does not provide MPI_THREAD_MULTIPLE" in said
