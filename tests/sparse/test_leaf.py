"""A weight that is read stands for its parameter: what is done to a dense one reaches it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse import sparsify
from tests.sparse.masking import sparse_and_dense

MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
INPUTS = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def layers():
    """A layer stored sparse and its dense twin."""
    torch.manual_seed(0)
    return sparse_and_dense(nn.Linear(6, 4), {"weight": MASK})


def backward(layers):
    for layer in layers:
        layer(INPUTS).square().sum().backward()


def values_of(layer):
    return layer._parameters["weight"]


def test_the_gradient_reads_with_the_dense_shape(layers):
    sparse, dense = layers
    assert sparse.weight.grad is None
    backward(layers)
    assert torch.equal(sparse.weight.grad.dense(), dense.weight.grad * MASK)


def test_the_gradient_is_changed_set_and_cleared(layers):
    sparse, _ = layers
    backward(layers)
    expected = values_of(sparse).grad * 2
    sparse.weight.grad.mul_(2)
    assert torch.equal(values_of(sparse).grad, expected)
    sparse.weight.grad = torch.ones(4, 6)
    assert torch.equal(values_of(sparse).grad, torch.ones(int(MASK.sum())))
    sparse.weight.grad = None
    assert values_of(sparse).grad is None


def test_the_gradient_of_a_read_that_retains_it_is_its_own(layers):
    sparse, _ = layers
    weight = sparse.weight
    weight.retain_grad()
    nn.functional.linear(INPUTS, weight).sum().backward()
    weight.square().sum().backward()
    torch.testing.assert_close(weight.grad[MASK], values_of(sparse).grad)
    weight.grad = None
    assert values_of(sparse).grad is not None


def test_it_is_frozen_and_trained_again(layers):
    sparse, _ = layers
    sparse.weight.requires_grad_(False)
    assert not sparse.weight.requires_grad
    backward(layers)
    assert values_of(sparse).grad is None
    sparse.weight.requires_grad = True
    with torch.no_grad():
        assert sparse.weight.requires_grad
    backward(layers)
    assert values_of(sparse).grad is not None


def test_hooks_see_gradients_of_the_dense_shape_at_every_backward(layers):
    sparse, dense = layers
    shapes = []

    def hook(gradient):
        shapes.append(gradient.shape)
        return gradient * torch.arange(6.0)

    handles = [layer.weight.register_hook(hook) for layer in layers]
    backward(layers)
    backward(layers)
    assert shapes == [(4, 6)] * 4
    torch.testing.assert_close(values_of(sparse).grad, dense.weight.grad[MASK])
    for handle in handles:
        handle.remove()
    backward(layers)
    assert len(shapes) == 4


def test_a_hook_on_a_sum_of_two_uses_fires_once():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (x * self.weight.sum(0)).sum(1, keepdim=True)

    torch.manual_seed(0)
    layers = sparse_and_dense(Twice(6, 4), {"weight": MASK})
    for layer in layers:
        layer.weight.register_hook(lambda gradient: gradient.square())
    backward(layers)
    torch.testing.assert_close(values_of(layers[0]).grad, layers[1].weight.grad[MASK])


def test_a_hook_after_accumulation_gets_the_kept_values(layers):
    sparse, _ = layers
    seen = []
    handle = sparse.weight.register_post_accumulate_grad_hook(seen.append)
    backward(layers)
    handle.remove()
    backward(layers)
    assert [id(parameter) for parameter in seen] == [id(values_of(sparse))]


def test_other_data_is_written_to_the_kept_entries(layers):
    sparse, _ = layers
    data = torch.randn(4, 6)
    sparse.weight.data = data
    assert torch.equal(values_of(sparse), data[MASK])
    with pytest.raises(ValueError, match=r"\(4, 6\).*\(6,\).*densify"):
        sparse.weight.data = torch.ones(6)


def test_a_weight_of_16_bits_has_gradients_of_its_dtype():
    layer = nn.Linear(6, 4, dtype=torch.bfloat16)
    sparsify(layer, {"weight": MASK})
    layer(INPUTS.bfloat16()).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16
    layer.weight.grad = torch.ones(4, 6, dtype=torch.bfloat16)
    assert values_of(layer).grad.dtype == torch.float32


def test_tensors_made_of_it_stand_for_themselves(layers):
    sparse, _ = layers
    detached = sparse.weight.detach()
    detached.requires_grad_()
    detached.grad = torch.ones(4, 6)
    assert torch.equal(detached.grad, torch.ones(4, 6))
    assert values_of(sparse).grad is None
