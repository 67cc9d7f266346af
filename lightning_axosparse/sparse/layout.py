"""Layout: which entries of a pruned tensor are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_axosparse.sparse import kernels

INT32_ENTRIES = 2**31
"""Tensors with fewer entries than this are indexed by int32."""


def index_dtype(numel: int) -> torch.dtype:
    """The integer type that indexes a flattened tensor of ``numel`` entries."""
    return torch.int32 if numel < INT32_ENTRIES else torch.int64


@dataclass(eq=False)
class CooLayout:
    """The kept entries of one tensor, as coordinates in its flattened form.

    One integer a kept entry, shared by values, gradient and every optimizer state of the tensor
    (SAMO; Singh & Bhatele, IPDPS 2023).

    Attributes:
        shape: shape of the dense tensor.
        indices: flat positions of the kept entries, ascending, shape ``(nnz,)``, int32 (int64 for
            tensors of 2^31 entries or more).
    """

    shape: torch.Size
    indices: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> CooLayout:
        """The layout that keeps the entries where ``mask`` (bool, any shape) is True."""
        indices = mask.reshape(-1).nonzero().squeeze(1).to(index_dtype(mask.numel()))
        return cls(mask.shape, indices)

    @property
    def nnz(self) -> int:
        """Number of kept entries."""
        return self.indices.numel()

    def compress(self, dense: Tensor) -> Tensor:
        """The kept entries of ``dense`` (of the layout's shape), shape ``(nnz,)``.

        Raises:
            ValueError: if ``dense`` has another shape.
        """
        if dense.shape != self.shape:
            raise ValueError(
                f"This layout keeps entries of a tensor of shape {tuple(self.shape)}; "
                f"got one of shape {tuple(dense.shape)}."
            )
        return kernels.compress(dense, self.indices)

    def densify(self, values: Tensor) -> Tensor:
        """A dense tensor of the layout's shape: ``values`` (shape ``(nnz,)``) and zeros."""
        return kernels.densify(values, self.indices, self.shape)

    def mask(self) -> Tensor:
        """True where an entry is kept: bool, of the layout's shape."""
        kept = torch.ones(self.nnz, dtype=torch.bool, device=self.indices.device)
        return self.densify(kept)

    def to(self, device: torch.device) -> CooLayout:
        """This layout with its indices on ``device``; itself where they are there already."""
        if self.indices.device == device:
            return self
        return CooLayout(self.shape, self.indices.to(device))

    def move(self, device: torch.device) -> None:
        """Take the indices to ``device`` in place, for all who share this layout."""
        self.indices = self.indices.to(device)

    def same_entries(self, other: CooLayout) -> bool:
        """Whether ``other`` keeps exactly the same entries of the same shape."""
        return self.shape == other.shape and torch.equal(
            self.indices, other.indices.to(self.indices.device)
        )
