from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.pipeline.crossing.stray_tensors import has_stray_tensor, young_tensors


class Store:
    """A class, and objects, with a list."""

    def __init__(self) -> None:
        self.values: list[Any] = []


class Ignored(torch.autograd.Function):
    """Stores its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.given = {"x": [x]}
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def is_noticed(store: Callable[[Tensor], Any], own: tuple[nn.Module, ...] = ()) -> bool:
    """Whether it is noticed what a function stores of a tensor with a graph."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    before = young_tensors()
    output = store(linear(x))
    return has_stray_tensor({*map(id, before), id(output)}, own)


@pytest.mark.parametrize("collection", [list, deque])
def test_a_tensor_in_another_module_is_noticed(collection: Any) -> None:
    other = nn.Identity()
    other.values = collection()
    other.inner = SimpleNamespace(by_name={})
    assert is_noticed(lambda x: other.values.append(x))
    assert is_noticed(lambda x: other.inner.by_name.update(x=x.sum()))


def test_a_tensor_of_a_class_is_noticed() -> None:
    kind: Any = type("Kind", (), {"values": []})
    assert is_noticed(lambda x: kind.values.append(x))


def test_a_tensor_in_a_global_variable_is_noticed() -> None:
    code = "values = []\ndef store(x):\n    values.append(x)\n    return x * 2"
    names: dict[str, Any] = {}
    exec(code, names)
    assert is_noticed(names["store"])


def test_a_tensor_in_an_object_of_the_layer_alone_is_its_own_affair() -> None:
    layer, store = nn.Identity(), Store()
    layer.store = store
    assert not is_noticed(lambda x: layer.store.values.append(x), (layer,))
    shared = nn.Identity()
    shared.store = store
    assert is_noticed(lambda x: layer.store.values.append(x), (layer,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.tanh() * x.exp(),
        Ignored.apply,
        lambda x: checkpoint(torch.tanh, x.exp(), use_reentrant=False),
        lambda x: checkpoint(lambda y: y[0].tanh(), [x.exp()], use_reentrant=False),
        lambda x: nn.LSTM(4, 4)(x[None])[0],
    ],
)
def test_what_a_backward_pass_needs_is_not_noticed(function: Any) -> None:
    assert not is_noticed(function)
