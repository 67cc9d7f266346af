"""Hooks are called once a batch, with the gradient of all of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.gradient_hooks import GradientHooks


def differentiate(parameter: nn.Parameter, passes: int = 3) -> None:
    for _ in range(passes):
        (2 * parameter).sum().backward()


def test_hooks_see_the_sum_of_all_passes_once() -> None:
    parameter, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    seen: list[Any] = []
    parameter.register_hook(lambda gradient: seen.append(gradient.tolist()))
    parameter.register_hook(lambda gradient: gradient.clamp(max=5))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))

    hooks = GradientHooks([parameter, other])
    assert list(hooks.parameters) == [parameter]
    with hooks.set_aside():
        differentiate(parameter)
        assert not seen
    earlier: dict[nn.Parameter, Tensor | None] = {parameter: torch.ones(2)}
    hooks.call(parameter, earlier, None)
    assert seen == [[6, 6], [6, 6]]  # clamped, then added to what was there before
    assert earlier == {parameter: None}

    parameter.grad = None
    differentiate(parameter, passes=1)
    assert seen[2:] == [[2, 2], [2, 2]]


def test_hooks_may_remove_themselves_and_are_not_called_without_a_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> None:
        seen.append(gradient)
        handle.remove()

    handle = parameter.register_hook(hook)
    hooks = GradientHooks([parameter])
    hooks.call(parameter, {}, None)
    assert not seen
    with hooks.set_aside():
        differentiate(parameter)
    hooks.call(parameter, {}, None)
    assert len(seen) == 1
    assert not GradientHooks([parameter]).parameters


def test_hooks_come_back_when_a_pass_fails() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.register_hook(lambda gradient: 2 * gradient)
    try:
        with GradientHooks([parameter]).set_aside():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        differentiate(parameter, passes=1)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [4, 4]
