"""Encodes a pytree of tensors as a message between stages: a header and a block of bytes.

The header has the shapes, so they may change from one batch to the next.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import tree_leaves, tree_map_only

_ALIGNMENT = 16  # bytes; a multiple of every element size, so that each tensor can be a view


class Gradients(NamedTuple):
    """What a stage sends back for a micro-batch.

    Attributes:
        tensors: the gradient of each leaf of the activation; None where there is none.
        factor: with the last micro-batch, what the gradients of the whole batch are still to be
            multiplied by (see ``loss_weights``).
    """

    tensors: list[Tensor | None]
    factor: float


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


def tensors(tree: Any) -> list[Tensor | None]:
    """The leaves of a pytree, with None for those that are no tensors."""
    return [leaf if isinstance(leaf, Tensor) else None for leaf in tree_leaves(tree)]
