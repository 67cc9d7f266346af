from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse.pipeline.partition import find_layers


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
    model.body[1].compile()
    assert len(find_layers(model, None, 5)) == 5


@pytest.mark.parametrize("order", ["twice", "in_turns", "partly", "by_values"])
def test_an_order_that_is_not_plain_is_left_to_the_user(order: str) -> None:
    for example in (torch.randn(8, 4), None, "no tensor"):
        with pytest.raises(MisconfigurationException, match="example_input_array"):
            find_layers(Model(order, example), None, 2)
