"""A module stored sparse under what is done to modules: parameters replaced, other devices."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from typing import ClassVar

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils import fusion, parametrizations, prune, vector_to_parameters

from lightning_axosparse import densify, sparsify
from lightning_axosparse.sparse.module.sparse_module import SparseModule
from tests.sparse.masking import random_masks, sparse_and_dense
from tests.sparse.store.test_materialize import network, with_and_without_copy

INPUTS = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


@with_and_without_copy
def test_a_replaced_parameter_is_dense(compute):
    model = network()
    sparsify(model, random_masks(model), compute=compute)
    model[0].weight = nn.Parameter(torch.ones(32, 16))
    assert isinstance(model[0].weight, nn.Parameter)
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(32, 16))
    model.load_state_dict(network().state_dict())
    densify(model)
    assert torch.equal(model[0](INPUTS), network()[0](INPUTS))


def test_one_of_several_parameters_is_replaced():
    recurrent = nn.LSTM(16, 8)
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in recurrent.named_parameters()}
    sparse, dense = sparse_and_dense(recurrent, masks)
    replacement = torch.randn(32, 16)
    for one in (sparse, dense):
        one.weight_ih_l0 = nn.Parameter(replacement.clone())
        one.bias_hh_l0 = None if one is sparse else nn.Parameter(torch.zeros(32))
    sparse.bias_hh_l0 = nn.Parameter(torch.zeros(32))
    torch.testing.assert_close(sparse(INPUTS), dense(INPUTS))
    assert sparse.state_dict().keys() == dense.state_dict().keys()


def test_fusion_with_batch_norm():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    sparse, dense = sparse_and_dense(layers, random_masks(layers))
    fused = [fusion.fuse_conv_bn_eval(*one.eval()) for one in (sparse, dense)]
    images = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(fused[0](images), fused[1](images))
    torch.testing.assert_close(fused[0].state_dict(), fused[1].state_dict())


@pytest.mark.parametrize(
    "replace",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: setattr(layer, "weight", torch.ones(32, 16)),
        lambda layer: delattr(layer, "weight"),
        torch.jit.script,
    ],
)
def test_what_needs_a_dense_parameter_raises_and_changes_nothing(replace):
    model = network()
    sparsify(model, random_masks(model))
    before = model(INPUTS)
    with pytest.raises(MisconfigurationException, match=r"Linear is stored sparse.*densify"):
        replace(model[0])
    assert torch.equal(model(INPUTS), before)
    densify(model)
    assert torch.equal(model(INPUTS), before)


@with_and_without_copy
def test_shapes_on_the_meta_device_and_no_way_back(compute):
    model = network()
    sparsify(model, random_masks(model), compute=compute)
    model(INPUTS)
    model.to("meta")
    output = model(INPUTS.to("meta"))
    assert (output.shape, output.device.type) == ((3, 4), "meta")
    output.sum().backward()
    with pytest.raises(RuntimeError, match=r"forgotten.*meta device.*sparsify"):
        model.to_empty(device="cpu")


@with_and_without_copy
def test_made_loaded_and_used_in_inference_mode(compute):
    with torch.inference_mode():
        model = network()
        masks = random_masks(model)
        sparsify(model, masks, compute=compute)
        model(INPUTS)
        model.load_state_dict({name: 2 * v for name, v in network().state_dict().items()})
        model[2].weight.mul_(3)
        found = model(INPUTS)
    with torch.no_grad():
        dense = network()
        for name, parameter in dense.named_parameters():
            parameter.mul_(2 * masks.get(name, torch.ones(())) * (3 if name == "2.weight" else 1))
        torch.testing.assert_close(found, dense(INPUTS))
        torch.testing.assert_close(model(INPUTS), dense(INPUTS))


@with_and_without_copy
def test_other_data_for_the_parameters(compute):
    model = network()
    sparsify(model, random_masks(model), compute=compute)
    model(INPUTS)
    vector_to_parameters(torch.ones(sum(p.numel() for p in model.parameters())), model.parameters())
    found = model(INPUTS)
    densify(model)
    torch.testing.assert_close(found, model(INPUTS))


class Cell(ABC):
    """An abstract class before a module's, as pytorch-forecasting has them."""

    @abstractmethod
    def steps(self) -> int:
        """Nothing."""


class Recurrent(Cell, nn.RNNBase):
    pass


class AbstractLSTM(Recurrent, nn.LSTM):
    def steps(self) -> int:
        return 3


class SlottedLinear(nn.Linear):
    __slots__ = ("kind",)


class Named:
    """A plain class, which holds attributes of its own, before a module's."""

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.name = "plain"


class NamedLinear(Named, nn.Linear):
    pass


class Registry(type):
    kinds: ClassVar[list[str]] = []


class RegisteredLinear(nn.Linear, metaclass=Registry):
    def __init_subclass__(cls, kind: str) -> None:
        Registry.kinds.append(kind)


@pytest.mark.parametrize(
    "layer",
    [AbstractLSTM(16, 8), SlottedLinear(16, 8), NamedLinear(16, 8), RegisteredLinear(16, 8)],
)
def test_a_module_of_any_class_is_stored_sparse_and_dense_again(layer: nn.Module) -> None:
    kind = type(layer)
    expected = copy.deepcopy(layer)
    masks = {name: torch.rand(p.shape) < 0.5 for name, p in layer.named_parameters()}
    with torch.no_grad():
        for name, weight in expected.named_parameters():
            weight *= masks[name]
    sparsify(layer, masks)
    assert isinstance(layer, kind)
    assert isinstance(layer, SparseModule)
    copied = pickle.loads(pickle.dumps(layer))
    for one in (layer, copied, copy.deepcopy(layer)):
        torch.testing.assert_close(one(INPUTS), expected(INPUTS))
        assert sum(p.numel() for p in one.parameters()) < 0.7 * sum(
            m.numel() for m in masks.values()
        )
    densify(layer)
    assert type(layer) is kind
    torch.testing.assert_close(layer(INPUTS), expected(INPUTS))
    assert Registry.kinds == []


def test_a_parametrized_subclass_of_a_stored_class_has_all_its_methods() -> None:
    layer = nn.Linear(16, 8)
    sparsify(layer, random_masks(layer))
    stored = type(layer)
    made = type("Made", (stored,), {})
    assert made.__mro__ == (made, *stored.__mro__)
    assert stored.__mro__ == (stored, SparseModule, *nn.Linear.__mro__)
