"""Moves modules and optimizers that keep only a part of their tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer


def move_module(module: LightningModule, device: torch.device) -> None:
    """Move every tensor but those on the meta device, which stand for other stages' tensors.

    ``LightningModule.to`` raises for meta tensors; like it, this sets ``module.device``.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)
    _update_properties(module, device=device)


def move_optimizers(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the state of optimizers to a device."""
    _optimizers_to_device(optimizers, device)
