"""Stages connect as messages reach them best; these arrive whole and in order, also from GPUs.

GPUs have stand-ins for streams here, which run what they were given only when the test says so.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lightning_axosparse.distributed.mpi.transport import (
    PinnedStaging,
    Staging,
    describe_connections,
)
from tests.ranks import run_ranks

WAYS = [(1, False, False), (3, False, True), (3, True, True)]  # window, shares memory, slow copies


def exchange(
    batches: list[list[list[int]]], seed: int, window: int, shares: bool, slow: bool
) -> list[Any]:
    """Send and receive, in each batch, blocks of the sizes listed for this rank."""
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi.transport import Channel, ProgressThread, Staging
    from lightning_axosparse.distributed.rank_status import BackOff

    class SlowStaging(Staging):
        """Has blocks ready only some time after they were given to it, the later ones sooner."""

        def outgoing(self, block: torch.Tensor) -> Any:
            times = iter([False] * rng.randint(0, 5))
            return block, lambda: next(times, True)

    comm = MPI.COMM_WORLD
    rng = random.Random(seed + comm.rank)
    staging = SlowStaging() if slow else Staging()
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
        received.append([(header, block.numel(), block.unique().tolist()) for header, block in got])
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


CPU = torch.device("cpu")


class Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.queue: list[Callable[[], None]] = []
        self.waits_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        stream.queue.append(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        return self.done


class Runtime:
    """Stands in for ``torch.cuda``."""

    Event = Event

    def __init__(self) -> None:
        self.compute = Stream()
        self.streams: list[Stream] = []
        self.active = self.compute

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.active

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.active, before = stream, self.active
        yield
        self.active = before


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    stand_in = Runtime()
    copy = Tensor.copy_

    def queued_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return copy(target, source)
        stream, view = stand_in.active, source[:]
        alive = weakref.ref(source)

        def run() -> None:
            assert alive() is not None, "the source is gone before it was copied"
            copy(target, view)

        stream.queue.append(run)
        return target

    used: list[tuple[Tensor, Any]] = []
    monkeypatch.setattr(Tensor, "copy_", queued_copy)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, s: used.append((t, s)))
    stand_in.used = used
    return stand_in


def test_mpi_uses_the_memory_of_cpu_tensors() -> None:
    block = torch.arange(5, dtype=torch.uint8)
    given, ready = Staging().outgoing(block)
    assert given is block
    assert ready()
    assert Staging().incoming(block) is block
    assert Staging().empty(7).shape == (7,)


def test_a_pinned_copy_is_ready_when_it_is_done_after_the_compute_stream(
    runtime: Runtime,
) -> None:
    pinned = PinnedStaging(CPU, runtime)
    host, ready = pinned.outgoing(torch.arange(5, dtype=torch.uint8))
    leaving, arriving = runtime.streams
    assert leaving.waits_for == [runtime.compute]
    assert arriving.waits_for == []
    assert runtime.compute.queue == []
    assert not ready()
    leaving.run()
    assert ready()
    assert host.tolist() == [0, 1, 2, 3, 4]


def test_the_compute_stream_waits_for_what_arrives_through_pinned_memory(runtime: Runtime) -> None:
    block = torch.arange(5, dtype=torch.uint8)
    arrived = PinnedStaging(CPU, runtime).incoming(block)
    assert runtime.compute.waits_for == runtime.streams[1:]
    assert arrived.data_ptr() != block.data_ptr()
    assert arrived.tolist() == block.tolist()
    assert [(t is arrived, s) for t, s in runtime.used] == [(True, runtime.compute)]


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
    shared = connect(2, 0, world.rank).shares_memory
    connect.cache_clear()
    with patch.object(transport, "shares_memory", return_value=False):
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
