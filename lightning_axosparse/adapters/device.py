"""Device: moves the part of a LightningModule that this rank holds."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import LightningModule
from torch import Tensor


def move_held(module: LightningModule, device: torch.device) -> None:
    """Move every tensor but those on the meta device, which stand for other stages' tensors.

    ``LightningModule.to`` would refuse the meta tensors; like it, this sets ``module.device``.
    """

    def move(tensor: Tensor) -> Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    module._apply(move)
    _update_properties(module, device=device)
