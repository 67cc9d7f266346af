import random
import time
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks


def exchange(batches: list[list[list[int]]], window: int, seed: int) -> list[Any]:
    """Send and receive, in each batch, blocks of the sizes listed for this rank."""
    from mpi4py import MPI

    from lightning_axosparse.backoff import BackOff
    from lightning_axosparse.mpi.transport import Mailbox

    comm = MPI.COMM_WORLD
    rng = random.Random(seed + comm.rank)
    box = Mailbox(comm.Dup(), 1 - comm.rank, window)
    received = []
    for number, sizes in enumerate(batches):
        box.begin(len(sizes[1 - comm.rank]))
        to_send = list(enumerate(sizes[comm.rank]))
        got: list[Any] = []
        back_off = BackOff()
        while to_send or len(got) < len(sizes[1 - comm.rank]):
            if to_send and rng.random() < 0.5:
                index, size = to_send.pop(0)
                header = bytes([number, index]) * (4000 if size == 7 else 1)
                box.send(header, torch.full((size,), index + 1, dtype=torch.uint8))
            if rng.random() < 0.3:
                time.sleep(0.001)
            box.poll()
            while box.arrived:
                header, block = box.arrived.popleft()
                got.append((header, block.numel(), block.unique().tolist()))
            back_off.pause()
        box.end()
        received.append(got)
    return received


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


@pytest.mark.parametrize("window", [1, 3])
def test_messages_of_any_and_changing_size_arrive_in_order(window: int) -> None:
    big, huge = 100_000, 3_000_000
    batches = [
        [[0, 7, 2048, 2049, big, 100], [big] * 4],
        [[big, big, 0, 2049, huge, 5], [big, 1, huge, big]],  # grown, shrunk, inlined
        [[], [50_000] * 6],  # one way only, more than before
        [[huge, 7, huge], [huge, 3, 70_000]],
    ]
    first, second = run_ranks(2, exchange, batches, window, 5)
    assert second == expected(batches, 0)
    assert first == expected(batches, 1)


def test_random_traffic() -> None:
    rng = random.Random(11)
    sizes = [0, 3, 7, 2048, 5000, 60_000]
    batches = [
        [[rng.choice(sizes) for _ in range(rng.randint(0, 6))] for _ in range(2)] for _ in range(12)
    ]
    first, second = run_ranks(2, exchange, batches, 2, 9)
    assert second == expected(batches, 0)
    assert first == expected(batches, 1)
