import os
import platform
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.distributed.mpi.node.slots import SlotReader, SlotWriter, shares_memory


def block(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 3)), max_size=20))
def test_blocks_stay_whole_while_they_are_held(messages: list[tuple[int, int]]) -> None:
    writer, reader = SlotWriter(), SlotReader()
    held: list[tuple[Tensor, int, int]] = []
    paths = set()
    most = 0
    for number, (size, drops) in enumerate(messages):
        address = writer.write(block(size, number))
        paths.add(address.path)
        held.append((reader.read(address), size, number))
        most = max(most, len(held))
        for arrived, size, value in held:
            assert torch.equal(arrived, block(size, value))
        del arrived
        del held[:drops]
    assert len(paths) == most


def test_a_slot_is_in_use_from_the_sending_until_the_last_view_is_gone() -> None:
    writer, reader = SlotWriter(), SlotReader()
    first = writer.write(block(100, 1))
    assert writer.write(block(100, 2)).path != first.path  # not read yet
    arrived = reader.read(first)
    view = arrived[:8].view(torch.float32)
    del arrived
    assert writer.write(block(100, 3)).path != first.path
    del view
    assert writer.write(block(100, 4)).path == first.path


def test_autograd_holds_the_slot_for_the_backward_pass() -> None:
    writer, reader = SlotWriter(), SlotReader()
    address = writer.write(torch.arange(4.0).view(torch.uint8))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * reader.read(address).view(torch.float32)).sum()
    assert writer.write(torch.zeros(4).view(torch.uint8)).path != address.path
    loss.backward()
    assert torch.equal(weight.grad, torch.arange(4.0))
    assert writer.write(torch.zeros(4).view(torch.uint8)).path == address.path


def test_a_forked_process_frees_nothing() -> None:
    writer, reader = SlotWriter(), SlotReader()
    address = writer.write(block(100, 1))
    arrived = reader.read(address)
    child = os.fork()
    if child == 0:
        del arrived
        os._exit(0)
    os.waitpid(child, 0)
    assert writer.write(block(100, 2)).path != address.path
    assert torch.equal(arrived, block(100, 1))


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
