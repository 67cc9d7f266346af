"""Forward-mode differentiation, vmap, batches of gradients and jit.trace: the dense numbers."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.ops import torch_functions
from lightning_axosparse.support.torch_internals import observed, tree_leaves, tree_map_only
from tests.sparse.masking import apply_masks, random_masks


@pytest.fixture(params=["dense", "replaced functions", "resident"])
def networks(request, monkeypatch):
    """A network stored sparse, the masked dense one and the masks."""
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 2**18 if request.param == "dense" else 0)
    torch.manual_seed(0)

    class Reads(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    sparse = nn.Sequential(
        nn.Linear(6, 12), nn.Unflatten(-1, (1, 12)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(-2)
    ).append(Reads(30, 4))
    masks = random_masks(sparse)
    dense = copy.deepcopy(sparse)
    apply_masks(dense, masks)
    sparsify(sparse, masks, compute="samo" if request.param == "resident" else "sparse")
    return sparse, dense, masks


INPUTS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def assert_same(function, networks):
    torch.testing.assert_close(function(networks[0]), function(networks[1]))


def test_directional_derivatives(networks):
    assert_same(lambda one: torch.func.jvp(one, (INPUTS,), (INPUTS.sin(),)), networks)

    def dual(one):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(one(forward_ad.make_dual(INPUTS, INPUTS.sin()))).tangent

    assert_same(dual, networks)


def test_directional_derivatives_in_the_kept_values(networks):
    _, _, masks = networks

    def derivative(one):
        values = {name: parameter.detach() for name, parameter in one.named_parameters()}
        along = {name: torch.ones_like(value) for name, value in values.items()}
        if one is networks[1]:
            along = {name: one * masks.get(name, 1) for name, one in along.items()}
        call = lambda values: torch.func.functional_call(one, values, (INPUTS,))  # noqa: E731
        return torch.func.jvp(call, (values,), (along,))[1]

    assert_same(derivative, networks)


def test_samples_apart(networks):
    assert_same(lambda one: torch.func.vmap(one)(INPUTS), networks)


def test_derivatives_in_the_inputs(networks):
    assert_same(lambda one: torch.func.jacrev(one)(INPUTS[0]), networks)
    assert_same(lambda one: torch.func.hessian(lambda x: one(x).sum())(INPUTS[0]), networks)


def test_gradients_in_a_batch(networks):
    sparse, dense, masks = networks
    found, expected = (
        torch.autograd.grad(
            one(INPUTS[0]), list(one.parameters()), torch.eye(4), is_grads_batched=True
        )
        for one in (sparse, dense)
    )
    for (name, _), one, other in zip(sparse.named_parameters(), found, expected, strict=True):
        torch.testing.assert_close(one, other[:, masks[name]] if name in masks else other)


@pytest.mark.filterwarnings("ignore")
def test_a_trace_runs_without_the_package_and_follows_the_values(networks):
    sparse, dense, _ = networks
    traced = torch.jit.trace(sparse, INPUTS)
    torch.testing.assert_close(traced(INPUTS[:2]), dense(INPUTS[:2]))
    with torch.no_grad():
        for one in (sparse, dense):
            one[0].weight.mul_(2)
    torch.testing.assert_close(traced(INPUTS), dense(INPUTS))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(INPUTS), dense(INPUTS))


Pair = namedtuple("Pair", "first second")


class Many(tuple):
    """No node of a pytree."""


@pytest.mark.parametrize(
    "tree",
    [
        1,
        None,
        (),
        [1, (2, [3, "a"]), {"b": 4, "a": [5, None]}],
        Pair(1, {"x": Pair((2,), 3)}),
        OrderedDict(b=[1], a=2),
        [deque([1, 2]), Many((3, 4)), torch.Size([5, 6])],
        torch.return_types.max((1, (2, 3))),
    ],
    ids=repr,
)
def test_the_pytrees_are_those_of_torch(tree):
    assert tree_leaves(tree) == pytree.tree_leaves(tree)
    for wanted in (int, (int, str), tuple, Many):
        found = tree_map_only(wanted, repr, tree)
        torchs = pytree.tree_map_only(wanted, repr, tree)
        assert found == torchs
        assert pytree.tree_structure(found) == pytree.tree_structure(torchs)


class Recorder(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs", "function"),
    [
        (nn.Linear(64, 64), torch.randn(2, 64), nn.functional.linear),
        (nn.Embedding(64, 64), torch.arange(3), nn.functional.embedding),
    ],
)
def test_a_mode_sees_what_sparse_layers_compute(layer, inputs, function, with_gradients):
    sparsify(layer, random_masks(layer))
    with torch.set_grad_enabled(with_gradients), Recorder() as recorder:
        layer(inputs)
    assert function in recorder.functions


def test_a_default_device_sees_nothing():
    with torch.device("cpu"):
        assert not observed()
        with Recorder():
            assert observed()
