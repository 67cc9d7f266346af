import os

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.mpi.shared import Inbox, Outbox


def block(size: int, value: int) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 3)), max_size=20))
def test_blocks_stay_whole_while_they_are_held(messages: list[tuple[int, int]]) -> None:
    outbox, inbox = Outbox(), Inbox()
    held: list[tuple[Tensor, int, int]] = []
    paths = set()
    most = 0
    for number, (size, drops) in enumerate(messages):
        place = outbox.put(block(size, number))
        paths.add(place.path)
        held.append((inbox.take(place), size, number))
        most = max(most, len(held))
        for arrived, size, value in held:
            assert torch.equal(arrived, block(size, value))
        del arrived
        del held[:drops]
    assert len(paths) == most


def test_a_slot_is_in_use_from_the_sending_until_the_last_view_is_gone() -> None:
    outbox, inbox = Outbox(), Inbox()
    first = outbox.put(block(100, 1))
    assert outbox.put(block(100, 2)).path != first.path  # not taken in yet
    arrived = inbox.take(first)
    view = arrived[:8].view(torch.float32)
    del arrived
    assert outbox.put(block(100, 3)).path != first.path
    del view
    assert outbox.put(block(100, 4)).path == first.path


def test_autograd_holds_the_slot_for_the_backward_pass() -> None:
    outbox, inbox = Outbox(), Inbox()
    place = outbox.put(torch.arange(4.0).view(torch.uint8))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * inbox.take(place).view(torch.float32)).sum()
    assert outbox.put(torch.zeros(4).view(torch.uint8)).path != place.path
    loss.backward()
    assert torch.equal(weight.grad, torch.arange(4.0))
    assert outbox.put(torch.zeros(4).view(torch.uint8)).path == place.path


def test_a_forked_process_frees_nothing() -> None:
    outbox, inbox = Outbox(), Inbox()
    place = outbox.put(block(100, 1))
    arrived = inbox.take(place)
    child = os.fork()
    if child == 0:
        del arrived
        os._exit(0)
    os.waitpid(child, 0)
    assert outbox.put(block(100, 2)).path != place.path
    assert torch.equal(arrived, block(100, 1))
