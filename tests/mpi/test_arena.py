from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.mpi.arena import Address, Arena, arena, opened

MIB = 2**20


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


def test_what_is_given_back_takes_no_memory_and_is_lent_again() -> None:
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
    assert memory.offset(memory.block(4 * MIB)) == place  # the holes have grown together


def test_tensors_of_others_lie_elsewhere() -> None:
    assert Arena().offset(torch.zeros(10)) < 0
    assert Arena().offset(Arena().block(10)) < 0


def test_more_than_the_machine_has_is_refused() -> None:
    memory = Arena()
    with pytest.raises(MemoryError, match="MiB in one piece"):
        memory.block(memory.memory.size)


def test_a_neighbour_reads_a_block_by_its_offset() -> None:
    memory = Arena()
    block = memory.block(100).fill_(3)
    seen = opened(memory.address)
    assert seen is not memory.memory
    assert (seen[memory.offset(block) :][:100] == 3).all()
    with pytest.raises(ValueError, match="is not a neighbour's arena"):
        opened(Address(memory.address.path, bytes(16)))


def test_a_process_has_one_arena_and_its_children_their_own() -> None:
    own = arena()
    assert own is not None
    assert arena() is own
    assert opened(own.address) is own.memory
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
