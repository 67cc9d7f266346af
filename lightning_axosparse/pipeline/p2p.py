"""Sends activations to the next stage and gradients to the previous one, and receives them."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_axosparse.pipeline.message import decode, encode, relink


class Link(Protocol):
    """One stage's connection to the adjacent stages.

    Messages of one direction arrive in the order in which they were sent.
    """

    activations: deque[Any]
    """Arrived from the previous stage and not yet used, oldest first."""

    gradients: deque[Any]
    """Arrived from the next stage and not yet used, oldest first."""

    def begin(self, activations: int, gradients: int) -> None:
        """Prepare to receive so many messages of each direction in this batch."""

    def send_activation(self, tree: Any) -> None:
        """Send to the next stage without waiting."""

    def send_gradient(self, tree: Any) -> None:
        """Send to the previous stage without waiting."""

    def poll(self) -> None:
        """Progress messages, and append what has arrived to the deques."""

    def end(self) -> None:
        """Wait until everything sent in this batch has left."""


class Channel(Protocol):
    """Ordered messages to and from an adjacent stage, as ``distributed.mpi.transport`` has them."""

    arrived: deque[tuple[bytes, Tensor]]

    def begin(self, messages: int) -> None:
        """Start a batch in which so many messages will be received."""

    def send(self, header: bytes, block: Tensor) -> None:
        """Send a message without waiting."""

    def poll(self) -> None:
        """Progress messages, and append what has arrived to ``arrived``."""

    def end(self) -> None:
        """Wait until everything sent has left."""


class ChannelLink:
    """The link of a stage whose adjacent stages are other ranks.

    Args:
        previous: channel shared with the previous stage; None on the first.
        following: channel shared with the next stage; None on the last.
        device: of the stage; tensors are sent from it and received on it.
    """

    def __init__(
        self, previous: Channel | None, following: Channel | None, device: torch.device
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
        """Decode what has arrived from both adjacent stages."""
        for channel, arrived in (
            (self._previous, self.activations),
            (self._following, self.gradients),
        ):
            if channel is not None:
                channel.poll()
                while channel.arrived:
                    arrived.append(decode(*channel.arrived.popleft()))

    def end(self) -> None:
        """Wait until everything sent has left."""
        for channel in (self._previous, self._following):
            if channel is not None:
                channel.end()


class LoopbackLink:
    """The link of a stage whose adjacent stages are in the same process.

    The schedule and all other code are those used between ranks: for notebooks, debuggers, tests.
    """

    def __init__(self) -> None:
        self.activations: deque[Any] = deque()
        self.gradients: deque[Any] = deque()
        self._next: LoopbackLink | None = None
        self._previous: LoopbackLink | None = None

    @classmethod
    def chain(cls, stages: int) -> list[LoopbackLink]:
        """Create the links of all stages of a pipeline."""
        links = [cls() for _ in range(stages)]
        for left, right in pairwise(links):
            left._next, right._previous = right, left
        return links

    def begin(self, activations: int, gradients: int) -> None:
        """Do nothing: messages are passed as objects."""

    def send_activation(self, tree: Any) -> None:
        """Pass the tree to the next stage."""
        assert self._next is not None
        self._next.activations.append(relink(tree))

    def send_gradient(self, tree: Any) -> None:
        """Pass the tree to the previous stage."""
        assert self._previous is not None
        self._previous.gradients.append(relink(tree))

    def poll(self) -> None:
        """Do nothing: what was sent has arrived."""

    def end(self) -> None:
        """Do nothing: what was sent has arrived."""
