"""Link: how a stage hands activations forward and gradients backward, and where they arrive."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_axosparse.pipeline.message import decode, encode, relink


class Link(Protocol):
    """One stage's connection to its neighbours.

    Messages of one direction arrive in the order in which they were sent.
    """

    activations: deque[Any]
    """Arrived from the previous stage and not yet used, oldest first."""

    gradients: deque[Any]
    """Arrived from the next stage and not yet used, oldest first."""

    def begin(self, activations: int, gradients: int) -> None:
        """Get ready to receive so many messages of each direction in this batch."""

    def send_activation(self, tree: Any) -> None:
        """Send to the next stage without waiting."""

    def send_gradient(self, tree: Any) -> None:
        """Send to the previous stage without waiting."""

    def poll(self) -> None:
        """Let messages progress; what has arrived is appended to the deques."""

    def end(self) -> None:
        """Wait until everything sent in this batch has left."""


class Mailbox(Protocol):
    """Ordered messages to and from one neighbour: ``mpi.transport.Mailbox``."""

    arrived: deque[tuple[bytes, Tensor]]

    def begin(self, messages: int) -> None:
        """Start a batch in which so many messages will be received."""

    def send(self, header: bytes, block: Tensor) -> None:
        """Send a message without waiting."""

    def poll(self) -> None:
        """Append to ``arrived`` what has come."""

    def end(self) -> None:
        """Wait until everything sent has left."""


class MailboxLink:
    """The link of a stage whose neighbours are other ranks.

    Args:
        previous: mailbox shared with the previous stage; None on the first.
        following: mailbox shared with the next stage; None on the last.
        device: of the stage, where messages come from and go to.
    """

    def __init__(
        self, previous: Mailbox | None, following: Mailbox | None, device: torch.device
    ) -> None:
        self.activations: deque[Any] = deque()
        self.gradients: deque[Any] = deque()
        self._previous, self._following, self._device = previous, following, device

    def begin(self, activations: int, gradients: int) -> None:
        """Post the receives of a batch."""
        if self._previous is not None:
            self._previous.begin(activations)
        if self._following is not None:
            self._following.begin(gradients)

    def send_activation(self, tree: Any) -> None:
        """Send to the next stage."""
        assert self._following is not None
        self._following.send(*encode(tree, self._device))

    def send_gradient(self, tree: Any) -> None:
        """Send to the previous stage."""
        assert self._previous is not None
        self._previous.send(*encode(tree, self._device))

    def poll(self) -> None:
        """Take in what has arrived from both sides."""
        for mailbox, arrived in (
            (self._previous, self.activations),
            (self._following, self.gradients),
        ):
            if mailbox is not None:
                mailbox.poll()
                while mailbox.arrived:
                    arrived.append(decode(*mailbox.arrived.popleft()))

    def end(self) -> None:
        """Wait until everything sent has left."""
        for mailbox in (self._previous, self._following):
            if mailbox is not None:
                mailbox.end()


class LoopbackLink:
    """The link of a stage whose neighbours live in the same process.

    The same schedule and the same code as between ranks, for notebooks, debuggers and tests.
    """

    def __init__(self) -> None:
        self.activations: deque[Any] = deque()
        self.gradients: deque[Any] = deque()
        self._next: LoopbackLink | None = None
        self._previous: LoopbackLink | None = None

    @classmethod
    def chain(cls, stages: int) -> list[LoopbackLink]:
        """Make the connected links of a whole pipeline."""
        links = [cls() for _ in range(stages)]
        for left, right in pairwise(links):
            left._next, right._previous = right, left
        return links

    def begin(self, activations: int, gradients: int) -> None:
        """Need nothing: messages are handed over as objects."""

    def send_activation(self, tree: Any) -> None:
        """Hand the tree to the next stage."""
        assert self._next is not None
        self._next.activations.append(relink(tree))

    def send_gradient(self, tree: Any) -> None:
        """Hand the tree to the previous stage."""
        assert self._previous is not None
        self._previous.gradients.append(relink(tree))

    def poll(self) -> None:
        """Need nothing: what was sent has arrived."""

    def end(self) -> None:
        """Need nothing: what was sent has arrived."""
