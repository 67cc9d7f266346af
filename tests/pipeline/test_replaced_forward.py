from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.replaced_forward import Forward, ReplacedForward


def negated(own: Forward) -> Forward:
    return lambda x: -own(x)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_a_module_gets_its_own_forward_back() -> None:
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)
    own = layer(x)
    replaced = ReplacedForward(layer, negated)
    again = ReplacedForward(layer, negated)
    assert torch.equal(layer(x), own)
    again.remove()
    assert torch.equal(layer(x), -own)
    replaced.remove()
    assert "forward" not in vars(layer)
    layer.forward = doubled  # type: ignore[method-assign]
    ReplacedForward(layer, negated).remove()
    assert layer.forward is doubled


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_computes_with_its_own_weights(duplicate: Any) -> None:
    layers, x = nn.Sequential(nn.Linear(2, 3), nn.Identity()), torch.ones(1, 2)
    expected = layers(x)
    layers[1].forward = doubled
    for layer in layers:
        ReplacedForward(layer, negated)
    copied = duplicate(layers)
    nn.init.zeros_(layers[0].weight)
    assert torch.equal(copied(x), 2 * expected)
    nn.init.zeros_(copied[0].weight)
    assert torch.equal(copied(x), 2 * copied[0].bias.expand(1, 3))
    assert torch.equal(duplicate(copied)(x), copied(x))
