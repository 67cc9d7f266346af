from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.distributed.mpi.shared_memory import (
    Address,
    Arena,
    BlockPool,
    SlotWriter,
    arena,
    open_arena,
    read,
    shares_memory,
)

MIB = 2**20
CPU = torch.device("cpu")


def resident(held: Arena) -> int:
    """Bytes of the arena's file that take memory."""
    return os.stat(held.address.path).st_blocks * 512


@given(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 3)), max_size=30))
def test_blocks_do_not_overlap(requests: list[tuple[int, int]]) -> None:
    memory = Arena()
    held: list[tuple[torch.Tensor, int]] = []
    for number, (size, drops) in enumerate(requests):
        block = memory.block(size).fill_(number)
        assert block.shape == (size,)
        assert 0 < memory.offset(block) <= memory.memory.size - size
        held.append((block, number))
        del block
        for block, value in held:
            assert (block == value).all()
            del block
        del held[:drops]


def test_a_free_block_takes_no_memory_and_is_allocated_again() -> None:
    memory = Arena()
    rest = resident(memory)
    block = memory.block(4 * MIB).fill_(1)
    view, place = block.view(torch.float32)[7:9], memory.offset(block)
    del block
    assert resident(memory) == rest + 4 * MIB
    del view
    assert resident(memory) == rest
    parts = [memory.block(MIB) for _ in range(4)]
    assert [memory.offset(part) - place for part in parts] == [0, MIB, 2 * MIB, 3 * MIB]
    parts.clear()
    assert memory.offset(memory.block(4 * MIB)) == place  # the free ranges were joined


def test_offsets_of_other_tensors_are_negative() -> None:
    assert Arena().offset(torch.zeros(10)) < 0
    assert Arena().offset(Arena().block(10)) < 0


def test_more_than_the_machine_has_raises() -> None:
    memory = Arena()
    with pytest.raises(MemoryError, match="MiB in one piece"):
        memory.block(memory.memory.size)


def test_another_rank_reads_a_block_by_its_offset() -> None:
    memory = Arena()
    block = memory.block(100).fill_(3)
    seen = open_arena(memory.address)
    assert seen is not None
    assert seen is not memory.memory
    assert (seen[memory.offset(block) :][:100] == 3).all()
    assert open_arena(Address(memory.address.path, bytes(16))) is None
    assert open_arena(Address("/proc/self/fd/-1", memory.address.token)) is None


def test_a_process_has_one_arena_and_its_children_their_own() -> None:
    own = arena()
    assert own is not None
    assert arena() is own
    assert open_arena(own.address) is own.memory
    block = own.block(100).fill_(3)
    child = os.fork()
    if child == 0:
        del block
        os._exit(arena() is own)
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 3).all()


def test_there_is_none_where_address_space_is_limited() -> None:
    child = os.fork()
    if child == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, resource.RLIM_INFINITY))
        os._exit(arena() is not None)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pool_uses_a_block_again_when_no_tensor_uses_it() -> None:
    pool = BlockPool()
    first = pool.empty((3, 5), torch.float32, CPU)
    place = first.data_ptr()
    del first
    again = pool.empty((15,), torch.float32, CPU)
    assert again.data_ptr() == place
    assert pool.empty((15,), torch.float32, CPU).data_ptr() != place


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[2:3],
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.numpy(),
        lambda t: torch.nn.Parameter(t),
    ],
)
def test_a_view_keeps_the_block_of_its_tensor(hold: Callable[[Tensor], Any]) -> None:
    pool = BlockPool()
    tensor = pool.empty((8,), torch.float64, CPU).fill_(7)
    place, held = tensor.data_ptr(), hold(tensor)
    del tensor
    assert pool.empty((8,), torch.float64, CPU).fill_(0).data_ptr() != place
    assert (held == 7).all()
    del held
    assert pool.empty((8,), torch.float64, CPU).data_ptr() == place


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [(0,), (), (2, 3)])
def test_tensors_of_a_pool_have_the_requested_size_and_dtype(
    size: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = BlockPool().empty(size, dtype, CPU)
    assert (tensor.shape, tensor.dtype, tensor.device) == (size, dtype, CPU)
    assert tensor.is_contiguous()


def block(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 3)), max_size=20))
def test_blocks_stay_whole_while_they_are_held(messages: list[tuple[int, int]]) -> None:
    writer = SlotWriter()
    held: list[tuple[Tensor, int, int]] = []
    most = 0
    for number, (size, drops) in enumerate(messages):
        address = writer.write(block(size, number))
        held.append((read(address), size, number))
        most = max(most, len(held))
        for arrived, size, value in held:
            assert torch.equal(arrived, block(size, value))
        del arrived
        del held[:drops]
    assert len(writer._slots) <= most


def test_a_slot_is_in_use_from_the_sending_until_the_last_view_is_gone() -> None:
    writer = SlotWriter()
    first = writer.write(block(100, 1))
    assert writer.write(block(100, 2)).offset != first.offset  # not read yet
    arrived = read(first)
    view = arrived[:8].view(torch.float32)
    del arrived
    assert writer.write(block(100, 3)).offset != first.offset
    del view
    assert writer.write(block(100, 4)).offset == first.offset


def test_autograd_holds_the_slot_for_the_backward_pass() -> None:
    writer = SlotWriter()
    address = writer.write(torch.arange(4.0).view(torch.uint8))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * read(address).view(torch.float32)).sum()
    assert writer.write(torch.zeros(4).view(torch.uint8)).offset != address.offset
    loss.backward()
    assert torch.equal(weight.grad, torch.arange(4.0))
    assert writer.write(torch.zeros(4).view(torch.uint8)).offset == address.offset


def test_a_forked_process_frees_nothing() -> None:
    writer = SlotWriter()
    address = writer.write(block(100, 1))
    arrived = read(address)
    child = os.fork()
    if child == 0:
        del arrived
        os._exit(0)
    os.waitpid(child, 0)
    assert writer.write(block(100, 2)).offset != address.offset
    assert torch.equal(arrived, block(100, 1))


def test_a_reader_may_use_a_slot_for_longer_than_its_writer() -> None:
    SlotWriter()  # With the next one, what readers of earlier ones have freed is returned.
    own, writer = arena(), SlotWriter()
    assert own is not None
    rest = resident(own)
    arrived, unread = read(writer.write(block(MIB, 1))), writer.write(block(MIB, 2))
    del writer
    assert torch.equal(arrived, block(MIB, 1))
    assert torch.equal(read(unread), block(MIB, 2))
    del arrived
    SlotWriter()
    assert resident(own) == rest


class Itself:
    """A communicator in which each rank is its own peer."""

    def sendrecv(self, value: Any, peer: int, source: int) -> Any:
        return value


@pytest.mark.parametrize(("machine", "shares"), [("x86_64", True), ("aarch64", False)])
def test_slots_are_used_where_writes_are_seen_in_order(
    machine: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert shares_memory(Itself(), 0) == shares  # type: ignore[arg-type]
