"""Blocks are accessible to other ranks when their copies are done, also those of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_axosparse.distributed.mpi.staging import (
    DeviceSlot,
    DeviceStaging,
    PinnedStaging,
    Staging,
    can_map,
    shares_device_memory,
)
from tests.distributed.mpi.device import CPU, Runtime, queued_copies, share


@pytest.fixture
def runtime() -> Iterator[Any]:
    stand_in: Any = Runtime()
    with queued_copies(stand_in) as stand_in.used:
        yield stand_in


def test_mpi_uses_the_memory_of_cpu_tensors() -> None:
    block = torch.arange(5, dtype=torch.uint8)
    given, ready = Staging().outgoing(block)
    assert given is block
    assert ready()
    assert Staging().incoming(block) is block
    assert Staging().empty(7).shape == (7,)


def test_a_pinned_copy_is_ready_when_it_is_done_after_the_compute_stream(runtime: Any) -> None:
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


def test_the_compute_stream_waits_for_what_arrives_through_pinned_memory(runtime: Any) -> None:
    block = torch.arange(5, dtype=torch.uint8)
    arrived = PinnedStaging(CPU, runtime).incoming(block)
    assert runtime.compute.waits_for == runtime.streams[1:]
    runtime.synchronize()
    assert arrived.data_ptr() != block.data_ptr()
    assert arrived.tolist() == block.tolist()
    assert [(t is arrived, s) for t, s in runtime.used] == [(True, runtime.compute)]


def sent(sender: DeviceStaging, *numbers: int) -> DeviceSlot:
    slot, ready = sender.outgoing(torch.tensor(numbers, dtype=torch.uint8))
    assert isinstance(slot, DeviceSlot)
    assert not ready()
    return slot


def test_a_slot_is_used_again_when_its_block_was_read_and_not_before(runtime: Any) -> None:
    sender, reader = DeviceStaging(CPU, runtime, share), DeviceStaging(CPU, runtime, share)
    leaving, _, _, arriving = runtime.streams
    first = sent(sender, 1, 2, 3)
    leaving.run()
    arrived = reader.incoming(first)
    assert runtime.compute.waits_for == [arriving]
    reader.free_read()
    second = sent(sender, 4, 5)
    assert (first.number, second.number) == (0, 1), "the first has not been read"
    leaving.run()
    arriving.run()
    assert arrived.tolist() == [1, 2, 3]
    assert sent(sender, 6).number == 2, "the sender has not been told"
    reader.free_read()
    third = sent(sender, 7, 8, 9)
    assert third.number == 0
    assert third.memory is None, "the reader has mapped it"
    leaving.run()
    results = [reader.incoming(slot) for slot in (second, third)]
    arriving.run()
    assert [each.tolist() for each in results] == [[4, 5], [7, 8, 9]]
    assert arrived.tolist() == [1, 2, 3]


def test_a_larger_block_replaces_a_slot_that_is_free(runtime: Any) -> None:
    sender, reader = DeviceStaging(CPU, runtime, share), DeviceStaging(CPU, runtime, share)
    for size in (2, 5):
        slot = sent(sender, *range(size))
        assert (slot.number, slot.memory is None) == (0, False)
        runtime.synchronize()
        arrived = reader.incoming(slot)
        runtime.synchronize()
        reader.free_read()
        assert arrived.tolist() == list(range(size))


def test_an_empty_block_needs_no_slot(runtime: Any) -> None:
    staging = DeviceStaging(CPU, runtime, share)
    block, ready = staging.outgoing(torch.empty(0, dtype=torch.uint8))
    assert isinstance(block, Tensor)
    assert ready()
    assert staging.incoming(block).shape == (0,)


class Pair:
    """A communicator between two ranks, where the other one sends these values."""

    rank = 0

    def __init__(self, *theirs: Any) -> None:
        self.theirs, self.sent = list(theirs), list[Any]()

    def sendrecv(self, value: Any, dest: int, source: int) -> Any:
        self.sent.append(value)
        return self.theirs.pop(0)


def map_one(number: int) -> Tensor:
    if number < 0:
        raise RuntimeError("invalid device context")
    return torch.tensor([number])


@pytest.mark.parametrize(
    ("memory", "reads", "shares"),
    [
        ((map_one, (1,)), True, True),
        ((map_one, (1,)), False, False),  # The other rank cannot map this one's.
        ((map_one, (7,)), True, False),  # Other memory is at that address.
        ((map_one, (-1,)), True, False),
        (None, True, False),
    ],
)
def test_ranks_share_device_memory_if_both_can_read_it(
    memory: Any, reads: bool, shares: bool
) -> None:
    comm: Any = Pair(memory, reads)
    assert can_map(comm, 1, torch.tensor([0])) is shares
    assert not comm.theirs, "both ranks exchange two messages in any case"


def test_the_cpu_has_no_device_memory_to_share() -> None:
    comm: Any = Pair()
    assert not shares_device_memory(comm, 1, CPU)
