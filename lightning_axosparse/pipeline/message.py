"""Message: a pytree of tensors as it travels between stages, a header and a block of bytes.

Shapes travel with the message, so they may change from one batch to the next.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIGNMENT = 16  # bytes; a multiple of every element size, so that each tensor can be a view


@dataclass(frozen=True)
class _Place:
    """Stands in a header for a tensor, whose bytes begin at ``offset`` of the block."""

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

    Leaves that are no tensors are pickled into the header. A single contiguous tensor that is there
    already is not copied: it must not change until the message has left.
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

    header = pickle.dumps(pytree.tree_map_only(Tensor, place, tree))
    return header, pieces[1] if len(pieces) == 2 else torch.cat(pieces)


def decode(header: bytes, block: Tensor) -> Any:
    """Rebuild the pytree; its tensors are leaves of a new graph, and views of the block."""
    return pytree.tree_map_only(_Place, lambda place: place.read(block), pickle.loads(header))


def relink(tree: Any) -> Any:
    """Cut a pytree off its graph without copying: the message of stages that share a process."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), tree
    )


def tensors(tree: Any) -> list[Tensor | None]:
    """The leaves of a pytree, None in the place of what is no tensor."""
    return [leaf if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(tree)]
