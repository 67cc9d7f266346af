"""A library's own linear layer multiplies with its kept values directly, wherever that is all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_axosparse import densify, sparsify
from lightning_axosparse.pipeline.stage import PipelinedLayers
from lightning_axosparse.sparse import module as module_module
from tests.sparse.masking import random_masks, sparse_and_dense


class Doubling(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Renamed(nn.Linear):
    """Another class, but the library's forward."""


@pytest.fixture
def reads(monkeypatch):
    """The weights that were read as dense-shaped tensors."""
    reads = []
    read = module_module.sparse_weight
    monkeypatch.setattr(
        module_module, "sparse_weight", lambda *args: reads.append(args) or read(*args)
    )
    return reads


def twins(module):
    return sparse_and_dense(module, random_masks(module))


def differentiate(module, *shape, frozen=()):
    """Output and gradients, by name, of the same numbers."""
    module.zero_grad()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    inputs = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)
    inputs.requires_grad_("inputs" not in frozen)
    output = module(inputs)
    output.square().sum().backward()
    return {"output": output.detach(), "inputs": inputs.grad, "bias": module.bias.grad}


def agree(module, *shape, **options):
    sparse, dense = twins(module)
    ours, theirs = differentiate(sparse, *shape, **options), differentiate(dense, *shape, **options)
    torch.testing.assert_close(ours, theirs)
    if dense.weight.grad is not None:
        kept = sparse._layouts["weight"].compress(dense.weight.grad)
        torch.testing.assert_close(sparse._parameters["weight"].grad, kept)


@pytest.mark.parametrize("make", [nn.Linear, Renamed, lambda i, o: Conv1D(o, i)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 0), (2, 3)])
def test_the_weight_is_not_read(make, leading, reads):
    agree(make(6, 10), *leading, 6)
    assert not reads


def test_a_forward_that_was_kept_serves_the_layer_when_it_is_dense_again():
    layer = nn.Linear(6, 10)
    sparsify(layer, random_masks(layer))
    forward = layer.forward
    densify(layer)
    torch.testing.assert_close(forward(torch.ones(6)), layer(torch.ones(6)), rtol=0, atol=0)


def test_a_layer_that_a_pipeline_has_been_given_before(reads):
    layer = nn.Linear(6, 10)
    pipelined = PipelinedLayers(["0"], [layer], [range(1)])
    pipelined.install([0])
    sparsify(layer, random_masks(layer))
    layer(torch.ones(6))
    assert not reads
    pipelined.uninstall()
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("frozen", ["inputs", "weight", "bias"])
def test_frozen_parts(frozen, reads):
    agree(nn.Linear(6, 10), 3, 6, frozen=(frozen,))
    assert not reads


def test_without_gradients_and_without_bias(reads):
    sparse, dense = twins(nn.Linear(6, 10, bias=False))
    with torch.no_grad():
        torch.testing.assert_close(sparse(torch.ones(2, 6)), dense(torch.ones(2, 6)))
    assert not reads


def test_a_forward_of_ones_own_reads_the_weight(reads):
    agree(Doubling(6, 10), 3, 6)
    assert reads


def test_a_sparse_bias_is_read(reads):
    module = nn.Linear(6, 10)
    kept = torch.arange(10) % 2 == 0
    sparsify(module, {"weight": torch.ones(10, 6, dtype=torch.bool), "bias": kept})
    output = module(torch.ones(6))
    torch.testing.assert_close(output, F.linear(torch.ones(6), module.weight, module.bias))
    assert reads


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 5), torch.ones(2, 6, dtype=torch.float64), torch.ones(())]
)
def test_what_does_not_fit_is_refused_in_torchs_words(inputs):
    sparse, dense = twins(nn.Linear(6, 10))
    with pytest.raises(RuntimeError) as theirs:
        dense(inputs)
    with pytest.raises(RuntimeError) as ours:
        sparse(inputs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_casts_no_more_than_for_a_dense_layer(dtype):
    for layer in twins(nn.Linear(6, 10)):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
            layer(torch.ones(2, 6, dtype=dtype))


def test_the_gradient_can_be_differentiated():
    module = nn.Linear(6, 10).double()
    masks = random_masks(module)
    results = []
    for one in sparse_and_dense(module, masks):
        inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 6).requires_grad_()
        weight, bias = one._parameters["weight"], one.bias
        loss = one(inputs).pow(3).sum()
        first = list(torch.autograd.grad(loss, (weight, inputs, bias), create_graph=True))
        first[0] = first[0] if weight.dim() == 1 else first[0][masks["weight"]]
        sum(gradient.pow(2).sum() for gradient in first).backward()
        of_weight = weight.grad if weight.dim() == 1 else weight.grad[masks["weight"]]
        results.append((inputs.grad, bias.grad, of_weight))
    torch.testing.assert_close(*results)
