"""Lets the ranks that share layers run the same passes in the same order.

Collectives inside layers match only if all ranks of a tensor group are in the same pass. The first
rank chooses by the messages that it has, as without a group, and tells the others, in one byte;
these start what they were told once they have the message for it. RRFP (arXiv 2605.18750)
coordinates tensor groups in a message-driven pipeline for the same reason.

It cannot deadlock. The first rank starts only passes whose message it has. That message was sent by
the first rank of the adjacent stage, in a pass that the others of that stage have been told of, and
in which they send theirs. So, by induction over the passes in the order in which first ranks start
them, every rank gets the message for each pass that it is told of. Within a pass all ranks of the
group meet in the same collectives, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, get_args

import torch
import torch.distributed as dist

from lightning_axosparse.pipeline.schedule import Op, PassKind, Schedule

_KINDS: tuple[PassKind, ...] = get_args(PassKind)


class Order(Protocol):
    """Who decides which pass a stage starts."""

    @property
    def awaited(self) -> str:
        """What this rank waits for besides messages of adjacent stages, in words."""

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start the next pass, if there is one; arguments as for :meth:`Schedule.start_next`."""


class LeadingOrder:
    """The first rank of a group, whose schedule decides for all.

    Args:
        tell: tells the others the kind of a pass, without waiting for them.
    """

    awaited = ""

    def __init__(self, tell: Callable[[PassKind], None]) -> None:
        self._tell = tell

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start what the schedule chooses, and tell the others."""
        op = schedule.start_next(activations, gradients)
        if op is not None:
            self._tell(op.kind)
        return op


class FollowingOrder:
    """Another rank of a group, which replays what the first one starts.

    Args:
        ask: returns the kind of the next pass, in the order in which they are told; None as long as
            it has not been told.
        leader: the first rank, in words.
    """

    def __init__(self, ask: Callable[[], PassKind | None], leader: str) -> None:
        self._ask, self._leader = ask, leader
        self._told: PassKind | None = None

    @property
    def awaited(self) -> str:
        """The next pass, until it has been told."""
        return "" if self._told else f"the next pass from {self._leader}, which shares its layers"

    def start_next(self, schedule: Schedule, activations: int, gradients: int) -> Op | None:
        """Start what was told, once the message for it is here."""
        self._told = self._told or self._ask()
        if self._told is None or not schedule.has_arrived(self._told, activations, gradients):
            return None
        op, self._told = schedule.start(self._told), None
        return op


class _Told:
    """Passes on their way from the first rank of a group, by broadcasts that nobody waits in."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._kind = torch.zeros(1, dtype=torch.uint8)
        self._under_way: dist.Work | None = None

    def tell(self, kind: PassKind) -> None:
        self._broadcast(torch.tensor([_KINDS.index(kind)], dtype=torch.uint8))

    def ask(self) -> PassKind | None:
        if self._under_way is None:
            self._under_way = self._broadcast(self._kind)
        if not self._under_way.is_completed():
            return None
        self._under_way = None
        return _KINDS[int(self._kind)]

    def _broadcast(self, kind: torch.Tensor) -> dist.Work:
        work: dist.Work | None = dist.broadcast(kind, group_src=0, group=self._group, async_op=True)
        assert work is not None
        return work


def agreed_order(group: dist.ProcessGroup | None) -> Order | None:
    """Who decides on the ranks of a group that share layers; None: each stage for itself."""
    if group is None:
        return None
    told = _Told(group)
    if dist.get_rank(group) == 0:
        return LeadingOrder(told.tell)
    return FollowingOrder(told.ask, f"rank {dist.get_global_rank(group, 0)}")
