"""Replaces tensors that are not sent from stage to stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import tree_map_only


@dataclass(frozen=True)
class Unsent:
    """Describes a tensor that is not sent."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Unsent:
        """Describe ``tensor``."""
        return cls(tensor.shape, tensor.dtype, tensor.device.type, tensor.requires_grad)

    def placeholder(self) -> Tensor:
        """A tensor of NaN, which reveals a use of it; of zeros for integers."""
        is_number = self.dtype.is_floating_point or self.dtype.is_complex
        value = torch.full(
            (), torch.nan if is_number else 0, dtype=self.dtype, device=self.device
        ).expand(self.shape)
        return value.requires_grad_(self.requires_grad)


def described(tree: Any) -> Any:
    """Put descriptions in the place of a pytree's tensors."""
    if isinstance(tree, Tensor):  # as most layers return; a pytree takes ten times as long
        return Unsent.of(tree)
    return tree_map_only(Tensor, Unsent.of, tree)


def fill(tree: Any, placeholders: list[Tensor]) -> Any:
    """Put placeholders in the place of tensors that were not sent, and collect them."""

    def placeholder(unsent: Unsent) -> Tensor:
        placeholders.append(unsent.placeholder())
        return placeholders[-1]

    if isinstance(tree, Unsent):
        return placeholder(tree)
    return tree_map_only(Unsent, placeholder, tree)
