"""Tensors in memory that the C library uses again."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_axosparse.support.memory import heap as heap_memory
from lightning_axosparse.support.memory.heap import SMALLEST

SHAPES = [(), (3,), (5, 0), (SMALLEST // 4,), (7, 33, 211)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [heap_memory.zeros, heap_memory.empty])
def test_a_tensor_is_as_torch_would_make_it(make, shape: tuple[int, ...]) -> None:
    tensor = make(shape)
    assert tensor.shape == shape
    assert tensor.dtype == torch.float32
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert tensor._base is None
    assert tensor.storage_offset() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_zeros_are_zero(shape: tuple[int, ...]) -> None:
    before = heap_memory.zeros(shape).add_(1)
    del before
    assert not heap_memory.zeros(shape).any()


def test_the_memory_lives_as_long_as_the_tensor() -> None:
    tensors = [heap_memory.zeros((SMALLEST,)).fill_(i) for i in range(8)]
    views = [tensor[-5:] for tensor in tensors]
    del tensors
    others = [heap_memory.zeros((SMALLEST,)) for _ in range(8)]
    assert [float(view.mean()) for view in views] == list(range(8))
    assert not any(other.any() for other in others)


def test_what_leaves_an_autograd_function_may_be_changed_in_place() -> None:
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, source: Tensor) -> Tensor:
            return heap_memory.empty(source.shape).copy_(source)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            return gradient

    source = torch.ones(SMALLEST, requires_grad=True)
    Copy.apply(source).mul_(3).sum().backward()
    assert torch.equal(source.grad, torch.full((SMALLEST,), 3.0))


def test_a_mode_that_observes_operators_sees_what_is_allocated() -> None:
    seen = []

    class Observer(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func(*args, **(kwargs or {})))
            return seen[-1]

    with Observer():
        tensor = heap_memory.empty((SMALLEST,))
    assert tensor.data_ptr() in {made.data_ptr() for made in seen}
