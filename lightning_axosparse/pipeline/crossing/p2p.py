"""Sends activations to the next stage and gradients to the previous one, and receives them.

Between ranks a pytree of tensors is a header and a block of bytes. The header has the shapes, so
they may change from one batch to the next.
"""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import tree_map_only

if TYPE_CHECKING:  # It starts MPI, which the stages of one process do without.
    from lightning_axosparse.distributed.mpi.transport import Channel

_ALIGNMENT = 16  # bytes; a multiple of every element size, so that each tensor can be a view


class Link:
    """One stage's connection to the adjacent stages.

    Messages of one direction arrive in the order in which they were sent.

    Attributes:
        activations: arrived from the previous stage and not yet used, oldest first.
        gradients: arrived from the next stage and not yet used, oldest first.
    """

    def __init__(self) -> None:
        self.activations: deque[Any] = deque()
        self.gradients: deque[Any] = deque()

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


class ChannelLink(Link):
    """The link of a stage whose adjacent stages are other ranks.

    Args:
        previous: channel shared with the previous stage; None on the first.
        following: channel shared with the next stage; None on the last.
        device: of the stage; tensors are sent from it and received on it.
    """

    def __init__(
        self, previous: Channel | None, following: Channel | None, device: torch.device
    ) -> None:
        super().__init__()
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


class LoopbackLink(Link):
    """The link of a stage whose adjacent stages are in the same process.

    The schedule and all other code are those used between ranks: for notebooks, debuggers, tests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next: LoopbackLink | None = None
        self._previous: LoopbackLink | None = None

    @classmethod
    def chain(cls, stages: int) -> list[LoopbackLink]:
        """Create the links of all stages of a pipeline."""
        links = [cls() for _ in range(stages)]
        for left, right in pairwise(links):
            left._next, right._previous = right, left
        return links

    def send_activation(self, tree: Any) -> None:
        """Pass the tree to the next stage."""
        assert self._next is not None
        self._next.activations.append(relink(tree))

    def send_gradient(self, tree: Any) -> None:
        """Pass the tree to the previous stage."""
        assert self._previous is not None
        self._previous.gradients.append(relink(tree))


@dataclass(frozen=True)
class _Place:
    """Replaces a tensor in a header; its bytes begin at ``offset`` of the block."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    offset: int

    def read(self, block: Tensor) -> Tensor:
        end = self.offset + self.dtype.itemsize * self.shape.numel()
        tensor = block[self.offset : end].view(self.dtype).view(self.shape)
        return tensor.requires_grad_(self.requires_grad)


def encode(tree: Any, device: torch.device) -> tuple[bytes, Tensor]:
    """Turn a pytree into a header and the bytes of its tensors (1-D uint8, on ``device``).

    Leaves that are no tensors are pickled into the header. A single contiguous tensor on ``device``
    is not copied: it must not change until the message has left.
    """
    pieces = [torch.empty(0, dtype=torch.uint8, device=device)]
    end = 0

    def place(tensor: Tensor) -> _Place:
        nonlocal end
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if offset > end:
            pieces.append(torch.zeros(offset - end, dtype=torch.uint8, device=device))
        pieces.append(tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8))
        end = offset + pieces[-1].numel()
        return _Place(tensor.shape, tensor.dtype, tensor.requires_grad, offset)

    header = pickle.dumps(tree_map_only(Tensor, place, tree))
    return header, pieces[1] if len(pieces) == 2 else torch.cat(pieces)


def decode(header: bytes, block: Tensor) -> Any:
    """Rebuild the pytree; its tensors are leaves of a new graph, and views of the block."""
    return tree_map_only(_Place, lambda place: place.read(block), pickle.loads(header))


def relink(tree: Any) -> Any:
    """Detach a pytree from its graph without copying: the message of stages in one process."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), tree
    )
