"""Linear layers whose three products run by oneDNN, called by hand: torch takes MKL for float32."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``left @ right.T + bias`` of matrices, by oneDNN."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2).contiguous()
        for_x = product(rows, weight.t().contiguous()).view_as(x)
        for_weight = product(rows.t().contiguous(), x.flatten(0, -2).t().contiguous())
        return for_x, for_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class Linear(nn.Linear):
    """``nn.Linear`` on oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias)


def by_onednn(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose linear layers run by oneDNN."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear
    return module
