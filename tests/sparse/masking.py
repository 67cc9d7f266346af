"""What the sparse tests share: random masks, and a masked dense twin to compare with."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_axosparse.sparse import sparsify


def random_masks(module: nn.Module, kept: float = 0.3) -> dict[str, Tensor]:
    """A mask for each parameter with at least two dimensions."""
    return {
        name: torch.rand(parameter.shape) < kept
        for name, parameter in module.named_parameters()
        if parameter.dim() >= 2
    }


def apply_masks(module: nn.Module, masks: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in masks:
                parameter.mul_(masks[name])


def sparse_and_dense(module: nn.Module, masks: dict[str, Tensor]) -> tuple[nn.Module, nn.Module]:
    """``module`` stored sparse, and its dense twin with zeros where it is pruned."""
    dense = copy.deepcopy(module)
    apply_masks(dense, masks)
    sparsify(module, masks)
    return module, dense


def kept(name: str, tensor: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """What the sparse parameter of that name should hold of a dense ``tensor``."""
    return tensor[masks[name]] if name in masks else tensor
