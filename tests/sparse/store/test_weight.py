"""The sparse weight behaves as the dense weight, and as the leaf that its parameter is."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.sparse.store.weight import SparseWeight, sparse_weight
from tests.sparse.masking import sparse_and_dense


@pytest.fixture
def mask():
    torch.manual_seed(0)
    return torch.rand(4, 6) < 0.4


@pytest.fixture
def values(mask):
    return nn.Parameter(torch.randn(int(mask.sum())))


@pytest.fixture
def weight(values, mask):
    return sparse_weight(values, layout_of(mask))


@pytest.fixture
def dense(values, mask):
    """The same weight as a plain dense leaf."""
    return torch.zeros(mask.shape).masked_scatter(mask, values.detach()).requires_grad_()


def test_it_looks_like_the_dense_weight(weight, dense):
    assert isinstance(weight, SparseWeight)
    assert weight.shape == dense.shape
    assert weight.stride() == dense.stride()
    assert weight.dtype == dense.dtype
    assert weight.requires_grad
    assert "nnz=" in repr(weight)


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w.t(),
        lambda w: w.reshape(6, 4),
        lambda w: w[1:, ::2],
        lambda w: w.transpose(0, 1).unsqueeze(0),
        lambda w: w.chunk(2)[1],
        lambda w: w.expand(3, 4, 6),
        lambda w: w.detach(),
        lambda w: w.double(),
        lambda w: w.t().to(torch.bfloat16)[2:],
    ],
)
def test_views_and_casts_stay_sparse(weight, dense, view):
    seen, expected = view(weight), view(dense)
    assert isinstance(seen, SparseWeight)
    assert (seen.shape, seen.stride(), seen.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert torch.equal(seen.dense(), expected)


@pytest.mark.parametrize(
    "operator",
    [
        lambda w: w + 1,
        lambda w: w.abs().sum(1),
        lambda w: F.linear(torch.ones(2, 6), w),
        lambda w: torch.cat([w, w.flip(0)]),
        lambda w: w.view(torch.int32),
        lambda w: w.clone(),
        lambda w: torch.zeros(4, 6).add_(w.detach()),
    ],
)
def test_other_operators_see_a_dense_tensor(weight, dense, operator):
    result = operator(weight)
    assert type(result) is torch.Tensor
    assert torch.equal(result, operator(dense))


def test_conversions_to_python_numpy_and_bytes(weight, dense):
    assert weight.tolist() == dense.tolist()
    assert (weight.detach().numpy() == dense.detach().numpy()).all()
    assert torch.equal(pickle.loads(pickle.dumps(weight.detach())), dense)
    assert torch.equal(copy.deepcopy(weight.detach()), dense)


@pytest.mark.parametrize("read", [torch.clone, torch.t, torch.flatten, Tensor.contiguous])
def test_the_gradient_of_a_sum_is_one(weight, values, mask, read):
    """Its gradient is one number, seen at every entry."""
    read(weight).sum().backward()
    assert torch.equal(values.grad, torch.ones(int(mask.sum())))


def test_the_gradient_of_several_uses_of_one_read(weight, values, dense, mask):
    for one in (weight, dense):
        ((one @ one.t()).sum() + one[1].square().sum() + one.t().sum()).backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])


def test_in_place_operators_write_the_kept_entries(weight, values, dense, mask):
    with torch.no_grad():
        assert weight.mul_(2) is weight
        weight[1:, ::2].add_(3)
        dense.mul_(2)[1:, ::2].add_(3)
    assert torch.equal(values, dense[mask])
    assert torch.equal(weight.dense()[mask], values)
    nn.init.constant_(weight, 7.0)
    assert (values == 7).all()


def test_reading_without_gradient(mask):
    weight = sparse_weight(torch.ones(int(mask.sum())), layout_of(mask))
    assert not weight.requires_grad
    assert torch.equal(weight + 0, mask.float())


def test_a_sparse_weight_is_compressed_by_another_mask():
    torch.manual_seed(0)
    masks = [torch.rand(64, 96) < share for share in (0.5, 0.1)]
    values = torch.randn(int(masks[0].sum()))
    weight = sparse_weight(values, layout_of(masks[0]))
    scratch.clear()
    for layout in (layout_of(masks[1]), layout_of(masks[1], "bitmap")):
        dense = torch.zeros(64, 96).masked_scatter(masks[0], values)
        assert torch.equal(layout.compress(weight), dense[masks[1]])


# A weight that is read stands for its parameter: what is done to a dense one reaches it.

MASK = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
INPUTS = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def layers():
    """A layer stored sparse and the masked dense one."""
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


def test_a_weight_may_change_in_place_as_a_dense_one(layers):
    """By `data` also between forward and backward, as autograd does not see it."""
    factor = torch.rand(4, 6)
    outputs = [layer(INPUTS).square().sum() for layer in layers]
    for layer, output in zip(layers, outputs, strict=True):
        layer.weight.data *= factor
        layer.weight.data.clamp_(-0.1, 0.1)
        output.backward()
        with torch.no_grad():
            layer.weight *= factor
    sparse, dense = layers
    assert torch.equal(values_of(sparse), dense.weight[MASK])
    torch.testing.assert_close(values_of(sparse).grad, dense.weight.grad[MASK])
    output = sparse(INPUTS).sum()
    with torch.no_grad():
        sparse.weight *= factor
    with pytest.raises(RuntimeError, match="changed in place"):
        output.backward()


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
