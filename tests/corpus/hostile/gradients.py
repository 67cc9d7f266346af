"""Gradient hooks of parameters, and gradients inside the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression


@entry(equal=True)
class HookAfterAccumulation(Regression):
    def __init__(self) -> None:
        super().__init__()

        def clip(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.clamp_(-0.05, 0.05)

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(clip)


@entry(equal=True, trainer={"gradient_clip_val": 0.5})
class ClampsAndClips(Regression):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g.clamp(-0.05, 0.05))


@entry()
class HookOfTheOutput(Regression):
    """A hook of an activation sees the gradients of a micro-batch."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        out.register_hook(lambda g: g / (g.norm() + 1e-6))
        return F.mse_loss(out, y)


@entry()
class ReversesAndClampsBetweenLayers(Regression):
    def forward(self, x: Tensor) -> Any:
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number == 3 and x.requires_grad:
                x.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return x


@entry()
class BackwardHookOfALayer(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model[3].register_full_backward_hook(
            lambda module, given, out: (given[0] / (given[0].norm() + 1e-6),)
        )


@entry(Classification)
def adversarial_inner_loop(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Adversarial training with a backward pass of its own."""
    delta = torch.zeros_like(x, requires_grad=True)
    F.cross_entropy(self(x + delta), y).backward()
    assert delta.grad is not None
    return F.cross_entropy(self(x + 0.1 * delta.grad.sign()), y)


@entry(Regression)
def own_backward(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    loss.backward(retain_graph=True)
    return loss
