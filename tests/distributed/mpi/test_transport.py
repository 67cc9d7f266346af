from __future__ import annotations

import random
import time
from typing import Any

import torch

from tests.ranks import run_ranks

WAYS = [(1, False, False), (3, False, True), (3, True, True)]  # window, shares memory, slow copies


def exchange(
    batches: list[list[list[int]]], seed: int, window: int, shares: bool, slow: bool
) -> list[Any]:
    """Send and receive, in each batch, blocks of the sizes listed for this rank."""
    from mpi4py import MPI

    from lightning_axosparse.distributed.mpi.staging import HostStaging
    from lightning_axosparse.distributed.mpi.transport import Channel, ProgressThread
    from lightning_axosparse.distributed.rank_status import BackOff

    class SlowStaging(HostStaging):
        """Has blocks ready only some time after they were given to it, the later ones sooner."""

        def outgoing(self, block: torch.Tensor) -> Any:
            times = iter([False] * rng.randint(0, 5))
            return block, lambda: next(times, True)

    comm = MPI.COMM_WORLD
    rng = random.Random(seed + comm.rank)
    staging = SlowStaging() if slow else HostStaging()
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
