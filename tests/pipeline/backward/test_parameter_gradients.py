"""Products are computed one at a time, in the order that gives autograd's sums."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_axosparse.pipeline.backward.parameter_gradients import (
    GradientHooks,
    WeightGradientQueue,
    WeightProduct,
)
from lightning_axosparse.sparse.store.scratch import scratch


def known_product(parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> WeightProduct:
    """A product whose terms are known."""

    def compute(in_scratch: bool) -> Sequence[Tensor]:
        assert not torch.is_grad_enabled()
        first, *others = (tensor.clone() for tensor in tensors)
        if in_scratch:
            memory = scratch.take("weight gradient", first.numel(), first.dtype, first.device)
            first = memory.view(first.shape).copy_(first)
        return [first, *others]

    return WeightProduct(parameters, tensors, compute)


def parameters(count: int) -> list[list[nn.Parameter]]:
    """The weight and bias of so many layers."""
    return [[nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))] for _ in range(count)]


@given(
    layers=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    calls=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
def test_every_order_of_backwards_and_products_gives_the_sums_of_autograd(
    layers: int, microbatches: int, calls: int, seed: int
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    owned = parameters(layers)
    expected: dict[nn.Parameter, Tensor] = {}
    final: list[nn.Parameter] = []
    queue = WeightGradientQueue(final.append)
    waiting: list[int] = []
    for microbatch in range(microbatches):
        for layer in rng.sample(owned, layers):
            sums: list[Tensor] | None = None
            for _ in range(rng.randint(0, calls)):
                terms = [torch.randn(parameter.shape) for parameter in layer]
                queue.add(microbatch, known_product(layer, terms))
                sums = terms if sums is None else [a + b for a, b in zip(sums, terms, strict=True)]
            if sums is not None:
                for parameter, term in zip(layer, sums, strict=True):
                    known = expected.get(parameter)
                    expected[parameter] = term.clone() if known is None else known + term
        waiting.append(microbatch)
        while waiting and rng.random() < 0.5:
            if queue.holds(waiting[0]):
                queue.compute_next()
            else:
                waiting.pop(0)
    assert not final
    queue.end_backwards()
    while any(map(queue.holds, range(microbatches))):
        queue.compute_next()
        for parameter in final:
            assert torch.equal(parameter.grad, expected[parameter])
    assert len(final) == len(set(final)), "a gradient was final twice"
    for layer in owned:
        for parameter in layer:
            if parameter in expected:
                assert torch.equal(parameter.grad, expected[parameter])
            else:
                assert parameter.grad is None


def test_at_the_end_weights_follow_in_the_order_of_the_last_backward_pass() -> None:
    first, second, third = parameters(3)
    final: list[nn.Parameter] = []
    queue = WeightGradientQueue(final.append)
    for microbatch in range(3):
        for layer in (third, second, first):
            queue.add(microbatch, known_product(layer, [torch.ones(p.shape) for p in layer]))
    queue.compute_next()  # that of the third layer
    queue.end_backwards()
    order = []
    while any(map(queue.holds, range(3))):
        queue.compute_next()
        order.append(list(final))
    assert order == [
        [],
        third,
        third,
        third,
        [*third, *second],
        [*third, *second],
        [*third, *second],
        [*third, *second, *first],
    ]


def test_one_micro_batch_after_the_other_while_backward_passes_go_on() -> None:
    first, second = parameters(2)
    queue = WeightGradientQueue(lambda parameter: None)
    for microbatch in range(2):
        for layer in (second, first):
            queue.add(microbatch, known_product(layer, [torch.ones(p.shape) for p in layer]))
    for holds in ((True, True), (True, True), (False, True), (False, True)):
        assert (queue.holds(0), queue.holds(1)) == holds
        queue.compute_next()
    assert not queue.holds(1)


def test_the_bytes_of_a_micro_batch_count_shared_memory_once() -> None:
    (layer,) = parameters(1)
    queue = WeightGradientQueue(lambda parameter: None)
    both = torch.zeros(8, 3)
    queue.add(0, known_product(layer, [both[:2], both[2:]]))
    queue.add(0, known_product(layer, [both, torch.zeros(3)]))
    queue.add(1, known_product(layer, [torch.zeros(2, 3), torch.zeros(3)]))
    assert [queue.bytes_of(microbatch) for microbatch in range(3)] == [108, 36, 0]


def test_gradients_keep_the_layout_and_the_dtype_of_their_parameter() -> None:
    weight = nn.Parameter(torch.zeros(2, 4, 3, 3).to(memory_format=torch.channels_last))
    queue = WeightGradientQueue(lambda parameter: None)
    term = torch.randn(2, 4, 3, 3, dtype=torch.bfloat16)
    queue.add(0, known_product([weight], [term]))
    queue.compute_next()
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, term.float())


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
