"""Gradient hooks of parameters, and gradients inside the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.corpus.harness import entry
from tests.corpus.modules import Classification, Regression, Scalar


@entry(equal=True)
class ClampsGradients(Regression):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g.clamp(-0.05, 0.05))


@entry(equal=True)
class NormalizesGradients(Regression):
    def __init__(self) -> None:
        super().__init__()
        for p in self.model.parameters():
            p.register_hook(lambda g: g / (g.norm() + 1e-6))


@entry(equal=True)
class SignsOfGradients(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.model[4].weight.register_hook(torch.sign)


@entry(equal=True)
class ReplacesNotANumber(Regression):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: torch.nan_to_num(g))


@entry(equal=True)
class AddsWeightDecayInAHook(Regression):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g, p=p: g + 0.1 * p.detach())


@entry(equal=True)
class MasksGradients(Regression):
    """Linear, so it was right before."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones_like(self.model[2].weight).tril()
        self.model[2].weight.register_hook(lambda g: g * mask)


@entry(equal=True)
class HookOfOneLayerOfEachStage(Regression):
    def __init__(self) -> None:
        super().__init__()
        for number in (0, 4):
            self.model[number].bias.register_hook(lambda g: g.clamp(min=0))


@entry(equal=True)
class HookAfterAccumulation(Regression):
    def __init__(self) -> None:
        super().__init__()

        def clip(p: Tensor) -> None:
            assert p.grad is not None
            p.grad.clamp_(-0.05, 0.05)

        for p in self.parameters():
            p.register_post_accumulate_grad_hook(clip)


@entry(equal=True)
class CountsCallsOfAHook(Regression):
    """Right once a hook that draws noise is called once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = {name: 0 for name, _ in self.named_parameters()}
        for name, p in self.named_parameters():
            p.register_hook(lambda g, name=name: self.count(name))

    def count(self, name: str) -> None:
        self.calls[name] += 1


@entry(equal=True)
class RecordsNormsInAHook(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, float] = {}
        for name, p in self.named_parameters():
            p.register_hook(lambda g, name=name: self.norms.__setitem__(name, float(g.norm())))


@entry(equal=True, trainer={"accumulate_grad_batches": 2})
class ClampsAccumulatedGradients(ClampsGradients):
    pass


@entry(equal=True, trainer={"gradient_clip_val": 0.5})
class ClampsAndClips(ClampsGradients):
    pass


@entry(equal=True, random=True)
class NoiseInAHook(Regression):
    """Gradient noise; four times in a batch it would have half the variance."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))


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


@entry()
class NormalizingFunction(Regression):
    """A function whose backward pass uses the whole batch's gradient."""

    class Normalized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g / (g.norm() + 1e-6)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.Normalized.apply(self(x)), y)


@entry(Scalar)
def gradient_penalty(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of the output by the input, across stages."""
    x = x.requires_grad_()
    out = self(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * (gradient.norm(dim=1) - 1).pow(2).mean()


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


@entry(Regression)
def reads_gradients_in_the_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    loss = F.mse_loss(self(x), y)
    grads = torch.autograd.grad(loss, list(self.model[4].parameters()), retain_graph=True)
    norm = torch.stack([g.norm() for g in grads]).norm()
    return loss / norm.detach()


@entry(Regression)
def grad_norm_of_two_tasks(self: Any, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    out = self(x)
    first, second = F.mse_loss(out[:, 0], y[:, 0]), F.l1_loss(out[:, 1:], y[:, 1:])
    weight = self.model[4].weight
    one = torch.autograd.grad(first, weight, retain_graph=True)[0].norm()
    two = torch.autograd.grad(second, weight, retain_graph=True)[0].norm()
    return first + (one / two).detach() * second


@entry(equal=True)
class ScalesGradientsOfAParameterOutside(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.gain.register_hook(lambda g: g / (g.norm() + 1e-6))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self(x) * self.gain, y)
