"""Ranks that share layers run the same passes, whatever the order in which messages arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.pipeline.engine import _KINDS, SharedOrder
from lightning_axosparse.pipeline.schedule import SCHEDULES, ForwardOnly, Op, Schedule


class Rank:
    """One stage of one pipeline: its schedule, and the messages that have arrived."""

    def __init__(
        self, schedule: Schedule, order: SharedOrder, is_first: bool, is_last: bool
    ) -> None:
        self.schedule, self.order = schedule, order
        self.activations = schedule.microbatches if is_first else 0
        self.gradients = schedule.microbatches if is_last else 0
        self.passes: list[Op] = []

    def start_next(self) -> Op | None:
        op = self.order.start_next(self.schedule, self.activations, self.gradients)
        if op is not None:
            self.passes.append(op)
        return op


class Receive:
    """A broadcast in which a rank that follows takes part."""

    def __init__(self, told: deque[Tensor], kind: Tensor) -> None:
        self.told, self.kind = told, kind

    def is_completed(self) -> bool:
        if not self.told:
            return False
        self.kind.copy_(self.told.popleft())
        return True


def follower(told: deque[Tensor]) -> SharedOrder:
    return SharedOrder(0, False, lambda kind: Receive(told, kind))


def leader(tell: Callable[[Tensor], None]) -> SharedOrder:
    return SharedOrder(0, True, tell)


@given(
    data=st.data(),
    name=st.sampled_from([*SCHEDULES, "forward only"]),
    stages=st.integers(1, 4),
    g_tensor=st.integers(1, 3),
    microbatches=st.integers(1, 6),
    slack=st.integers(0, 3),
    forwards_first=st.booleans(),
)
def test_every_order_of_messages_ends_with_the_same_passes_in_a_group(
    data: st.DataObject,
    name: str,
    stages: int,
    g_tensor: int,
    microbatches: int,
    slack: int,
    forwards_first: bool,
) -> None:
    kind = ForwardOnly if name == "forward only" else SCHEDULES[name]
    limit = stages + slack
    ranks: dict[tuple[int, int], Rank] = {}
    arriving: list[tuple[int, int, str]] = []  # messages between stages, under way
    channels: list[tuple[deque[Tensor], deque[Tensor]]] = []  # told, and delivered
    for stage in range(stages):
        mine = [(deque[Tensor](), deque[Tensor]()) for _ in range(g_tensor - 1)]
        channels += mine

        def tell(kind: Tensor, mine: list = mine) -> None:
            for sent, _ in mine:
                sent.append(kind)

        orders = [leader(tell), *(follower(there) for _, there in mine)]
        for tensor_rank, order in enumerate(orders):
            schedule = kind(stage, stages, microbatches, limit, forwards_first)
            ranks[stage, tensor_rank] = Rank(schedule, order, stage == 0, stage == stages - 1)
    moves = 0
    while not all(rank.schedule.finished for rank in ranks.values()):
        moves += 1
        # Each message and each rank may be the slowest one; all move on sooner or later.
        places = data.draw(st.permutations(list(ranks)), "ranks") if moves < 8 else list(ranks)
        progress = False
        for place in places:
            rank = ranks[place]
            op = None if rank.schedule.finished else rank.start_next()
            if op is None:
                continue
            progress = True
            stage, tensor_rank = place
            if op.kind == "forward" and stage < stages - 1:
                arriving.append((stage + 1, tensor_rank, "activations"))
            if op.kind == "backward" and stage > 0:
                arriving.append((stage - 1, tensor_rank, "gradients"))
        pending = len(arriving)
        late = data.draw(st.integers(0, pending), "late") if pending and progress else 0
        for stage, tensor_rank, what in arriving[late:]:
            rank = ranks[stage, tensor_rank]
            setattr(rank, what, getattr(rank, what) + 1)
        del arriving[late:]
        for sent, there in channels:
            if sent and (not progress or data.draw(st.booleans(), "told")):
                there.append(sent.popleft())
                progress = True
        assert progress or pending, "no rank can move on"
    for stage in range(stages):
        passes = [ranks[stage, tensor_rank].passes for tensor_rank in range(g_tensor)]
        assert all(each == passes[0] for each in passes)


def test_a_rank_waits_for_the_message_of_the_pass_that_it_was_told() -> None:
    schedule = SCHEDULES["1f1b"](1, 2, 2, 2)
    told: deque[Tensor] = deque()
    order = follower(told)
    assert order.awaited == "the next pass from rank 0, which shares its layers"
    assert order.start_next(schedule, 1, 2) is None  # It has a message, but was told nothing.
    told.append(torch.tensor([_KINDS.index("forward")], dtype=torch.uint8))
    assert order.start_next(schedule, 0, 2) is None
    assert order.awaited == ""
    assert order.start_next(schedule, 1, 2) == Op("forward", 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_replayed_passes_leave_the_counts_of_the_schedule(name: str) -> None:
    chooses, replays = (SCHEDULES[name](0, 1, 3, 3) for _ in range(2))
    while not chooses.finished:
        op = chooses.start_next(3, 3)
        assert op is not None
        assert replays.start(op.kind) == op
    assert replays.finished
