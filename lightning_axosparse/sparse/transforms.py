"""Transforms: whether torch has to see the operators that run, and not only what comes of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def differentiates_forward() -> bool:
    """Whether every operator that runs is differentiated forward, or written down by jit.trace."""
    return forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None


def transforms() -> bool:
    """Whether that is so, or a transform of ``torch.func``, as ``vmap``, is at work."""
    return torch._C._are_functorch_transforms_active() or differentiates_forward()


def batched(tensor: Tensor) -> bool:
    """Whether ``tensor`` is several, as gradients of ``autograd.grad(is_grads_batched=True)``."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def transforms_backward(gradient: Tensor) -> bool:
    """Whether the backward pass that got ``gradient`` is transformed, or differentiated itself."""
    return torch.is_grad_enabled() or batched(gradient) or transforms()
