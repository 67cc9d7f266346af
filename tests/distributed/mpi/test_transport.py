"""Stages connect as messages reach them best; these arrive whole and in order, also from GPUs."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_axosparse.distributed.mpi.transport import describe_connections
from tests.distributed.mpi.device import CPU, Runtime, queued_copies, share
from tests.ranks import run_ranks

WAYS = [(1, False, "cpu"), (3, False, "slow"), (3, True, "slow"), (2, True, "device")]
"""Window, whether memory is shared, and the staging."""


def exchange(
    batches: list[list[list[int]]], seed: int, window: int, shares: bool, kind: str
) -> list[Any]:
    """Send and receive, in each batch, blocks of the sizes listed for this rank."""
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi.staging import DeviceStaging, Staging
    from lightning_axosparse.distributed.mpi.transport import Channel, ProgressThread
    from lightning_axosparse.distributed.rank_status import BackOff

    class SlowStaging(Staging):
        """Has blocks ready only some time after they were given to it, the later ones sooner."""

        def outgoing(self, block: torch.Tensor) -> Any:
            times = iter([False] * rng.randint(0, 5))
            return block, lambda: next(times, True)

    comm = MPI.COMM_WORLD
    rng = random.Random(seed + comm.rank)
    runtime = Runtime(lambda: rng.randint(0, 5))
    staging: Any = {"cpu": Staging, "slow": SlowStaging}.get(kind, Staging)()
    patches = ExitStack()
    if kind == "device":
        staging = DeviceStaging(CPU, runtime, share)
        patches.enter_context(queued_copies(runtime))
    channel = Channel(comm.Dup(), 1 - comm.rank, window, staging, shares, ProgressThread(comm))
    received = []
    for number, sizes in enumerate(batches):
        channel.begin(len(sizes[1 - comm.rank]))
        to_send = list(enumerate(sizes[comm.rank]))
        got: list[Any] = []
        back_off = BackOff(lambda: "the other's messages")
        while to_send or len(got) < len(sizes[1 - comm.rank]):
            if to_send and rng.random() < 0.5:
                index, size = to_send.pop(0)
                header = bytes([number, index]) * (4000 if size == 7 else 1)
                channel.send(header, torch.full((size,), index + 1, dtype=torch.uint8))
            if rng.random() < 0.3:
                time.sleep(0.001)
            channel.poll()
            while channel.arrived:
                got.append(channel.arrived.popleft())
            back_off.pause()
        channel.end()
        runtime.synchronize()
        received.append([(header, block.numel(), block.unique().tolist()) for header, block in got])
    patches.close()
    return received


def exchange_all() -> list[Any]:
    return [
        [exchange(batches, seed, *way) for way in WAYS]
        for seed, batches in enumerate((chosen_traffic(), random_traffic()))
    ]


def expected(batches: list[list[list[int]]], sender: int) -> list[Any]:
    return [
        [
            (
                bytes([number, index]) * (4000 if size == 7 else 1),
                size,
                [index + 1] if size else [],
            )
            for index, size in enumerate(sizes[sender])
        ]
        for number, sizes in enumerate(batches)
    ]


def chosen_traffic() -> list[list[list[int]]]:
    big, huge = 100_000, 3_000_000
    return [
        [[0, 7, 2048, 2049, big, 100], [big] * 4],
        [[big, big, 0, 2049, huge, 5], [big, 1, huge, big]],  # grown, shrunk, inlined
        [[], [50_000] * 6],  # one way only, more than before
        [[huge, 7, huge], [huge, 3, 70_000]],
    ]


def random_traffic() -> list[list[list[int]]]:
    rng = random.Random(11)
    sizes = [0, 3, 7, 2048, 5000, 60_000]
    return [
        [[rng.choice(sizes) for _ in range(rng.randint(0, 6))] for _ in range(2)] for _ in range(12)
    ]


def test_messages_of_any_and_changing_size_arrive_in_order() -> None:
    received = run_ranks(2, exchange_all)
    for number, batches in enumerate((chosen_traffic(), random_traffic())):
        for rank in range(2):
            assert received[rank][number] == [expected(batches, 1 - rank)] * len(WAYS)


def connect_and_probe() -> Any:
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi import transport
    from lightning_axosparse.distributed.mpi.shared_memory import shares_memory
    from lightning_axosparse.distributed.mpi.transport import (
        ProgressThread,
        connect,
        has_async_progress,
    )

    world = MPI.COMM_WORLD
    shared = connect(2, 0, world.rank, CPU).shares_memory
    connect.cache_clear()
    with patch.object(transport, "shares_memory", return_value=False):
        apart = connect(2, 0, world.rank, CPU).shares_memory
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
