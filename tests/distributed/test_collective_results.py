"""Results of collectives are recorded for the second pass of layers, which runs none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.distributed.collective_results import collective
from lightning_axosparse.pipeline.backward.recompute import Segment


class Work:
    def wait(self) -> None:
        """Nothing is under way."""


class Doubled(torch.autograd.Function):
    """Stands for an all-reduce over two ranks with the same values; counts how often it runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clone()

        def start() -> Any:
            Doubled.runs += 1
            collective(lambda: Work(), [result])  # type: ignore[arg-type, return-value]
            result.mul_(2)
            return Work()

        collective(start, [result])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        doubled = Doubled.apply(x * self.weight)
        result: Tensor = doubled.mul_(doubled.detach().sin())  # changes the collective's output
        return result.exp()


def trained(segment: Segment | None) -> list[Tensor | None]:
    layers, x = [Layer(), Layer()], torch.linspace(-1, 1, 4).requires_grad_()
    output = x
    for layer in layers:
        output = segment.run("", layer, layer, (output,), {}) if segment else layer(output)
    output.square().sum().backward()
    return [x.grad, *(layer.weight.grad for layer in layers)]


def test_no_collective_runs_twice_and_gradients_are_the_same() -> None:
    expected = trained(None)
    Doubled.runs = 0
    found = trained(Segment(torch.device("cpu")))
    assert Doubled.runs == 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Another(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = Doubled.apply(x)
        self.calls += 1
        return x.exp()


def test_a_layer_with_another_collective_the_second_time_is_refused() -> None:
    layer, x = Another(), torch.ones(2, requires_grad=True)
    output = Segment(torch.device("cpu")).run("", layer, layer, (x,), {})
    with pytest.raises(RuntimeError, match="has to do the same both times"):
        output.sum().backward()
