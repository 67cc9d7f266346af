from __future__ import annotations

import copy
import pickle
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse.support.patched import Forward, patched, replaced_forward


class Base:
    @staticmethod
    def named(x):
        return "own", x

    def method(self):
        return "own", self


class Derived(Base):
    pass


def test_an_attribute_that_an_object_has_from_its_class_is_its_class_again():
    it = Base()
    with patched(it, "method", lambda: "other"):
        assert it.method() == "other"
        assert Base().method()[0] == "own"
    assert "method" not in vars(it)
    assert it.method() == ("own", it)


def fail_while_patched(module):
    with (
        patched(module, "value", 2),
        patched(Base, "named", staticmethod(lambda x: "other")),
    ):
        assert Base().named(1) == Derived.named(1) == "other"
        raise KeyError(module.value)


def test_own_attributes_come_back_after_an_error_and_as_they_were():
    module = types.ModuleType("module")
    module.value = 1
    before = vars(Base)["named"]
    with pytest.raises(KeyError, match="2"):
        fail_while_patched(module)
    assert module.value == 1
    assert vars(Base)["named"] is before


def test_one_inside_another():
    it = Base()
    with patched(it, "method", 1), patched(it, "method", 2):
        assert it.method == 2
    assert it.method() == ("own", it)


def negated(own: Forward) -> Forward:
    return lambda x: -own(x)


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_a_module_gets_its_own_forward_back() -> None:
    layer, x = nn.Linear(2, 3), torch.ones(1, 2)
    own = layer(x)
    with replaced_forward(layer, negated):
        with replaced_forward(layer, negated):
            assert torch.equal(layer(x), own)
        assert torch.equal(layer(x), -own)
    assert "forward" not in vars(layer)
    layer.forward = doubled  # type: ignore[method-assign]
    with replaced_forward(layer, negated):
        assert layer.forward is not doubled
    assert layer.forward is doubled


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle])
def test_a_copy_computes_with_its_own_weights(duplicate: Any) -> None:
    layers, x = nn.Sequential(nn.Linear(2, 3), nn.Identity()), torch.ones(1, 2)
    expected = layers(x)
    layers[1].forward = doubled
    with replaced_forward(layers[0], negated), replaced_forward(layers[1], negated):
        copied = duplicate(layers)
    nn.init.zeros_(layers[0].weight)
    assert torch.equal(copied(x), 2 * expected)
    nn.init.zeros_(copied[0].weight)
    assert torch.equal(copied(x), 2 * copied[0].bias.expand(1, 3))
    assert torch.equal(duplicate(copied)(x), copied(x))
