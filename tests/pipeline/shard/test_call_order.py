from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.shard.partition import find_layers


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


class Model(nn.Module):
    """Its containers are made in another order than that in which they are called."""

    def __init__(self, order: str, example: Any = None) -> None:
        super().__init__()
        self.head, self.unused = nn.Sequential(*linears(2)), nn.ModuleList(linears(2))
        self.body, self.norm = nn.ModuleList(linears(3)), nn.BatchNorm1d(4)
        self.scale = torch.full((4,), 0.5)  # neither a parameter nor a buffer
        self.order, self.example_input_array = order, example
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        getattr(self, self.order)(nn.functional.dropout(self.norm(x) * self.scale))
        return x

    def plain(self, x: Tensor) -> None:
        for layer in self.body:
            x = x + layer(x)
        self.head(x)

    def twice(self, x: Tensor) -> None:
        self.plain(x)
        self.head(x)

    def in_turns(self, x: Tensor) -> None:
        for layer in self.body:
            x = self.head[0](layer(x))

    def partly(self, x: Tensor) -> None:
        self.head(self.body[0](x))

    def alternating(self, x: Tensor) -> None:
        for layer, other in zip(self.head, self.body[1:], strict=True):
            x = other(layer(x))
        self.body[0](x)
        raise ValueError(float(x.sum()))  # which comes too late to matter

    def by_values(self, x: Tensor) -> None:
        if x.sum() > 0:
            self.plain(x)


def test_containers_are_found_in_the_order_of_their_calls() -> None:
    x = torch.randn(8, 4)
    for example in (x, (x,), {"x": x}):
        model = Model("plain", example)
        state, seed = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
        assert list(find_layers(model, None, 5)) == [
            *("body.0", "body.1", "body.2"),
            *("head.0", "head.1"),
        ]
        assert torch.equal(seed, torch.get_rng_state())
        assert model.calls == 0
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert not any(layer._forward_pre_hooks for layer in model.modules())
    alternating = ["head.0", "body.1", "head.1", "body.2", "body.0"]
    assert list(find_layers(Model("alternating", x), None, 5)) == alternating
    model.body[1].compile()
    assert len(find_layers(model, None, 5)) == 5


def test_lists_of_lists_are_in_the_order_of_calls() -> None:
    class Lists(nn.Module):
        """Calls parts of each list from the last to the first, and one of no tensors twice."""

        def __init__(self, values: bool) -> None:
            super().__init__()
            lists = (nn.ModuleList([*linears(2), nn.ReLU(), nn.Tanh()]) for _ in range(2))
            self.body, self.values = nn.ModuleList(lists), values
            self.example_input_array = torch.randn(2, 4)

        def forward(self, x: Tensor) -> None:
            for first, second, activation, _ in self.body:
                if not self.values or x.sum() > 0:
                    x = activation(first(activation(second(x))))

    for pipeline in (None, "body"):
        found = find_layers(Lists(values=False), pipeline, 4)
        assert list(found) == ["body.0.1", "body.0.0", "body.1.1", "body.1.0"]
        found = find_layers(Lists(values=True), pipeline, 4)
        assert list(found) == [f"body.{i}.{k}" for i in range(2) for k in range(4)]


@pytest.mark.parametrize("order", ["twice", "in_turns", "partly", "by_values"])
def test_an_order_that_is_not_plain_is_left_to_the_user(order: str) -> None:
    for example in (torch.randn(8, 4), None, "no tensor"):
        with pytest.raises(MisconfigurationException, match="example_input_array"):
            find_layers(Model(order, example), None, 2)
