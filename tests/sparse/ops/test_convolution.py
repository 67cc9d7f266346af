"""Convolutions that run on unpruned values give a dense layer's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.ops import convolution
from tests.sparse.masking import random_masks, sparse_and_dense


class Renamed(nn.Conv2d):
    """Another class, but the library's forward."""


def differentiate(layer, inputs, masks, run=lambda layer, inputs: layer(inputs)):
    """Output and gradients, by name, after two micro-batches."""
    inputs = inputs.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    for _ in range(2):
        output = run(layer, inputs)
        factors = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
        (output * factors).sum().backward()
    weight = layer._parameters["weight"].grad
    weight = weight if weight.dim() == 1 else weight[masks["weight"]]
    bias = None if layer.bias is None else layer.bias.grad
    return {"output": output.detach(), "inputs": inputs.grad, "weight": weight, "bias": bias}


def agree(layer, inputs, density=0.2, **options):
    """Assert it, and return both outputs."""
    masks = random_masks(layer, density)
    sparse, dense = sparse_and_dense(layer, masks)
    ours, theirs = (differentiate(one, inputs, masks, **options) for one in (sparse, dense))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    return ours["output"], theirs["output"]


LAYERS = {
    "3x3": (lambda: nn.Conv2d(16, 24, 3, padding=1), (2, 16, 12, 12)),
    "renamed": (lambda: Renamed(16, 24, 3, padding=1), (2, 16, 12, 12)),
    "1x1": (lambda: nn.Conv2d(64, 24, 1, bias=False), (2, 64, 12, 12)),
    "stride": (lambda: nn.Conv2d(16, 24, 3, 2, 1), (2, 16, 15, 16)),
    "dilation": (lambda: nn.Conv2d(16, 24, (3, 5), (1, 2), (1, 0), (2, 1)), (2, 16, 15, 16)),
    "groups": (lambda: nn.Conv2d(32, 24, 3, groups=2), (2, 32, 15, 16)),
    "1d": (lambda: nn.Conv1d(32, 24, 3, padding=1), (2, 32, 70)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_weight_is_not_read(name, recompute, reads):
    make, shape = LAYERS[name]
    run = (
        (lambda *args: checkpoint(*args, use_reentrant=False)) if recompute else (lambda f, x: f(x))
    )
    agree(make(), torch.randn(shape), run=run)
    assert not reads


@pytest.mark.parametrize("name", ["3x3", "1x1", "stride"])
def test_channels_last(name, reads):
    make, shape = LAYERS[name]
    inputs = torch.randn(shape).to(memory_format=torch.channels_last)
    ours, theirs = agree(make(), inputs)
    assert ours.stride() == theirs.stride()
    assert not reads


DENSE = {
    "padding of other values": (
        lambda: nn.Conv2d(16, 24, 3, padding=1, padding_mode="circular"),
        2,
    ),
    "padding by name": (lambda: nn.Conv2d(16, 24, 3, padding="same"), 2),
    "padding beyond the filter": (lambda: nn.Conv2d(64, 24, 1, padding=1), 2),
    "three dimensions": (lambda: nn.Conv3d(16, 24, 3), 3),
    "transposed": (lambda: nn.ConvTranspose2d(16, 24, 3), 2),
    "a channel at a time": (lambda: nn.Conv2d(16, 16, 3, groups=16), 2),
    "float64": (lambda: nn.Conv2d(16, 24, 3, dtype=torch.float64), 2),
}


@pytest.mark.parametrize("name", DENSE)
def test_other_convolutions_read_the_weight(name, reads):
    make, dimensions = DENSE[name]
    layer = make()
    inputs = torch.randn(2, layer.in_channels, *[9] * dimensions, dtype=layer.weight.dtype)
    agree(layer, inputs)
    assert reads


def test_too_many_kept_too_few_outputs_and_no_batch(reads):
    agree(nn.Conv2d(16, 24, 3, padding=1), torch.randn(2, 16, 12, 12), density=0.4)
    agree(nn.Conv2d(16, 24, 3), torch.randn(1, 16, 5, 5))
    agree(nn.Conv2d(16, 24, 3), torch.randn(16, 12, 12))
    assert len(reads) == 3 * 2


def test_autocast_reads_the_weight(reads):
    layer, inputs = nn.Conv2d(16, 24, 3), torch.randn(2, 16, 12, 12)
    sparse, dense = sparse_and_dense(layer, random_masks(layer, 0.2))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = sparse(inputs), dense(inputs)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs)
    assert reads


def test_the_choice_is_the_callers(reads, monkeypatch):
    layer, inputs = nn.Conv2d(16, 24, 3), torch.randn(1, 16, 5, 5)
    masks = random_masks(layer, 0.5)
    sparse = copy.deepcopy(layer)
    sparsify(sparse, masks, compute="sparse")
    expected = sparse(inputs)
    assert not reads
    monkeypatch.setattr(convolution, "forward", None)
    sparsify(layer, masks, compute="dense")
    torch.testing.assert_close(layer(inputs), expected)


def test_a_resident_copy_is_used(monkeypatch):
    monkeypatch.setattr(convolution, "forward", None)
    layer = nn.Conv2d(16, 24, 3)
    sparsify(layer, random_masks(layer, 0.2), compute="samo")
    layer(torch.randn(2, 16, 12, 12))


@pytest.mark.parametrize("frozen", ["inputs", "weight", "bias"])
def test_frozen_parts(frozen, reads):
    layer = nn.Conv2d(16, 24, 3)
    sparse, dense = sparse_and_dense(layer, random_masks(layer, 0.2))
    gradients = []
    for one in (sparse, dense):
        inputs = torch.linspace(-1, 1, 2 * 16 * 12 * 12).view(2, 16, 12, 12)
        inputs.requires_grad_(frozen != "inputs")
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(name != frozen)
        one(inputs).square().sum().backward()
        gradients.append((inputs.grad, one.bias.grad))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)
    assert not reads


@pytest.mark.parametrize("name", ["3x3", "stride", "groups", "1d"])
def test_the_gradient_can_be_differentiated(name):
    make, shape = LAYERS[name]
    layer = make()
    masks = random_masks(layer, 0.2)
    found = []
    for one in sparse_and_dense(layer, masks):
        inputs = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).sin().requires_grad_()
        weight = one._parameters["weight"]
        loss = one(inputs).pow(3).mean()
        first = torch.autograd.grad(loss, (weight, inputs, one.bias), create_graph=True)
        of_weight = first[0] if weight.dim() == 1 else first[0][masks["weight"]]
        sum(gradient.pow(2).sum() for gradient in (of_weight, *first[1:])).backward()
        second = weight.grad if weight.dim() == 1 else weight.grad[masks["weight"]]
        found.append((inputs.grad, one.bias.grad, second))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


def test_values_that_changed_since_the_forward_pass_are_noticed():
    layer = nn.Conv2d(16, 24, 3)
    sparsify(layer, random_masks(layer, 0.2))
    output = layer(torch.randn(2, 16, 12, 12))
    with torch.no_grad():
        layer._parameters["weight"].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        output.sum().backward()


def test_a_conversion_loads_the_loops(monkeypatch):
    calls = []
    monkeypatch.setattr(convolution, "load_loops", lambda: calls.append(None))
    layer = nn.Conv2d(16, 24, 3)
    sparsify(copy.deepcopy(layer), random_masks(layer, 0.9))
    assert not calls
    sparsify(layer, random_masks(layer, 0.2))
    assert calls
