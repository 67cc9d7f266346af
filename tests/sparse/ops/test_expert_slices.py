"""Slices of a stack of matrices are sparse weights on parts of its unpruned values."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_axosparse import densify, sparsify
from lightning_axosparse.sparse.ops import experts
from lightning_axosparse.sparse.store.weight import SparseWeight

EXPERTS, ROWS, COLUMNS = 4, 6, 70


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, ROWS, COLUMNS, dtype=torch.float64))

    def forward(self, inputs, chosen=range(EXPERTS)):
        return sum(F.linear(inputs, self.weight[expert]).square().sum() for expert in chosen)


@pytest.fixture
def mask():
    torch.manual_seed(0)
    mask = torch.rand(EXPERTS, ROWS, COLUMNS) < 0.3
    mask[2] = False  # an expert of which all entries are pruned
    return mask


@pytest.fixture
def stack(mask):
    module = Stack()
    sparsify(module, {"weight": mask})
    return module


@pytest.fixture
def dense(stack):
    module = copy.deepcopy(stack)
    densify(module)
    return module


@pytest.fixture
def inputs():
    return torch.randn(3, COLUMNS, dtype=torch.float64)


def test_a_slice_is_a_sparse_weight_on_part_of_the_values(stack, dense):
    for expert in range(EXPERTS):
        one = stack.weight[expert]
        assert isinstance(one, SparseWeight)
        assert one.sparse_layout.shape == (ROWS, COLUMNS)
        assert torch.equal(one.dense(), dense.weight[expert])
    first, begin = stack.weight[1].stored_values, stack.weight.sparse_layout.edges[1]
    assert first.data_ptr() == stack._parameters["weight"][begin:].data_ptr()


def test_a_matrix_without_inputs_has_a_zero_gradient(stack, dense, inputs, mask):
    for module in (stack, dense):
        module(inputs, [0, 3, 0]).backward()
    found = stack.weight.grad.dense()
    torch.testing.assert_close(found, dense.weight.grad * mask, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[1], torch.zeros(ROWS, COLUMNS, dtype=torch.float64))


def node(weight):
    return weight.grad_fn.next_functions[0][0]


def test_all_reads_between_two_steps_split_the_values_once(stack, inputs):
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    first, second = stack.weight[0], stack.weight[1]
    assert node(first) is node(second)
    (F.linear(inputs, first) + F.linear(inputs, second)).sum().backward()
    assert node(stack.weight[0]) is node(first)
    optimizer.step()
    assert node(stack.weight[0]) is not node(first)


def test_nothing_of_a_graph_outlives_it(stack, inputs):
    gc.disable()  # no reference cycle: what an optimizer or a regrid replaces must be free
    try:
        loss = stack(inputs)
        assert stack.weight.sparse_layout in experts._latest
        loss.backward()
        del loss
        assert stack.weight.sparse_layout not in experts._latest
    finally:
        gc.enable()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_graphs_that_are_alive_together(stack, dense, inputs, order, mask):
    """Micro-batches whose forward passes have both run before the first backward pass."""
    for module in (stack, dense):
        losses = module(inputs, [0, 1]), module(inputs.flip(0), [1, 3])
        for one in order:
            losses[one].backward()
    expected = dense.weight.grad * mask
    torch.testing.assert_close(stack.weight.grad.dense(), expected, rtol=1e-12, atol=1e-12)


def test_recomputed_experts(stack, dense, inputs, mask):
    for module, reentrant in ((stack, False), (dense, False), (stack, True), (dense, True)):
        features = inputs.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(module, features, use_reentrant=reentrant).backward()
    expected = dense.weight.grad * mask
    torch.testing.assert_close(stack.weight.grad.dense(), expected, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_is_replaced_frozen_or_moved(stack, inputs):
    kept_alive = stack(inputs)
    parameter = stack._parameters["weight"]
    parameter.data = parameter.data * 2
    torch.testing.assert_close(stack(inputs), 4 * kept_alive)
    parameter.requires_grad_(False)
    assert not stack.weight[0].requires_grad
    parameter.requires_grad_(True)
    assert stack.weight[0].requires_grad
    with torch.no_grad():
        assert not stack.weight[0].requires_grad
    assert stack.float().weight[0].dtype == torch.float32


def test_what_is_written_to_a_slice_reaches_the_parameter(stack, dense, mask):
    with torch.no_grad():
        for module in (stack, dense):
            module.weight[1].mul_(3)
            module.weight[3] = 2.0
    assert torch.equal(stack.weight.dense(), dense.weight * mask)


def test_copies_pickles_and_state_dicts(stack, inputs):
    loss = stack(inputs)  # its graph is alive
    for other in (copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))):
        assert torch.equal(other(inputs), loss)
    other = Stack()
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other.weight, stack.weight.dense())


def test_a_pickle_has_the_index_once(stack, inputs):
    plain = len(pickle.dumps(stack))
    stack(inputs)
    assert len(pickle.dumps(stack)) == plain


def test_a_slice_is_as_differentiable_as_the_dense_one(stack, dense, inputs, mask):
    found = []
    for module, leaf in ((stack, stack._parameters["weight"]), (dense, dense.weight)):
        loss = sum(F.linear(inputs, module.weight[expert]).pow(3).sum() for expert in (0, 1))
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (gradient if module is stack else gradient[mask]).square().sum().backward()
        found.append(leaf.grad if module is stack else leaf.grad[mask])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
