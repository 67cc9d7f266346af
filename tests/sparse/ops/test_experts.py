"""What selects and multiplies experts computes what it does with dense, masked ones."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.module import convert
from lightning_axosparse.sparse.store.formats import FORMATS
from lightning_axosparse.sparse.store.layout import Layout

EXPERTS, ROWS, COLUMNS, TOKENS = 4, 72, 80, 5


class Stack(nn.Module):
    def __init__(self, shape=(EXPERTS, ROWS, COLUMNS), dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))


def stacks(**options):
    torch.manual_seed(0)
    dense = Stack(**options)
    mask = torch.rand(dense.weight.shape) < 0.2
    with torch.no_grad():
        dense.weight.mul_(mask)
    sparse = copy.deepcopy(dense)
    sparsify(sparse, {"weight": mask})
    return sparse, dense, mask


def grouped(x, w):
    offsets = torch.tensor([2, 2, 4, 5], dtype=torch.int32)  # the second expert has no token
    return F.grouped_mm(x[0], w.transpose(-2, -1), offs=offsets)


def grouped_by_loop(x, w):
    return torch.cat([x[0, :2] @ w[0].T, x[0, 2:4] @ w[2].T, x[0, 4:] @ w[3].T])


def only_some(x, w):
    return torch.stack([F.linear(x[e], w[torch.tensor(e)]) for e in (3, 0, 3)])


# Case: a function of inputs (EXPERTS, TOKENS, COLUMNS) and the stack.
WITHOUT_A_DENSE_STACK = {
    "linear of a number": lambda x, w: F.linear(x[1], w[1]),
    "linear of a negative number": lambda x, w: F.linear(x[1], w[-1]),
    "linear of a tensor": only_some,
    "product with T": lambda x, w: x[2] @ w[2].T,
    "product with mT": lambda x, w: torch.matmul(x[2], w[2].mT),
    "product by columns": lambda x, w: x[2, :, :ROWS] @ w[2],
    "addmm": lambda x, w: torch.addmm(x[0, 0, :ROWS], x[3], w[3].t()),
    "select": lambda x, w: F.linear(x[0], w.select(0, 2)) + F.linear(x[0], torch.select(w, 0, 1)),
    "unbind": lambda x, w: sum(F.linear(x[0], one) for one in w.unbind()),
    "iteration": lambda x, w: sum(F.linear(x[0], one) for one in w),
    "split": lambda x, w: F.linear(x[0], w.split([3, 1])[1][0]) + F.linear(x[0], w.split(2)[0][1]),
    "chunk": lambda x, w: torch.bmm(x[2:], w.chunk(2)[1].mT),
    "slice": lambda x, w: F.linear(x[0], w[1:3][1]) + F.linear(x[0], w[2:][0]),
    "narrow": lambda x, w: F.linear(x[0], w.narrow(0, 1, 2)[0]),
    "bmm": lambda x, w: torch.bmm(x, w.transpose(1, 2)),
    "bmm by columns": lambda x, w: torch.bmm(x[:, :, :ROWS], w),
    "bmm from the left": lambda x, w: torch.bmm(w, x.mT),
    "bmm without tokens": lambda x, w: torch.bmm(x[:, :0], w.mT),
    "matmul": lambda x, w: x @ w.mT,
    "matmul of one matrix of inputs": lambda x, w: x[0] @ w.mT,
    "matmul from the left": lambda x, w: w @ x.mT,
    "grouped_mm": grouped,
    "numbers": lambda x, w: torch.bmm(x, w[torch.tensor([3, 0, 3, -3])].mT),
    "numbers of 32 bits": lambda x, w: torch.bmm(x[:2], w[torch.tensor([2, 2]).int()].mT),
    "numbers from the left": lambda x, w: torch.bmm(w[torch.tensor([3, 0, 3, 1])], x.mT),
    "mT of a stack": lambda x, w: x[1] @ w.mT[1] + x[2] @ w.transpose(1, 2)[-2],
    "mT of a stack by its parts": lambda x, w: sum(x[0] @ one for one in w.mT.unbind()),
    "numbers, then one": lambda x, w: F.linear(x[0], w[torch.tensor([1, 0])][0]),
}
OTHERS = {
    "numbers in two dimensions": lambda x, w: x @ w[torch.tensor([[3, 0], [3, 1]])][0, 1].mT,
    "numbers and a row": lambda x, w: w[torch.tensor([3, 0]), 1].sum(0) * x[0],
    "no numbers": lambda x, w: w[torch.tensor([], dtype=torch.long)].sum(0) * x[0, 0],
    "a row": lambda x, w: w[1, 3] * x[0],
    "the gate of an expert": lambda x, w: F.linear(x[1], w[1, :10]),
    "some columns": lambda x, w: F.linear(x[1, :, ::2], w[1:3, :, ::2][0]),
    "every second": lambda x, w: F.linear(x[1], w[::2][1]),
    "a mask": lambda x, w: w[torch.tensor([True, False, False, True])].sum(0) * x[0, 0],
    "the last dimension": lambda x, w: w[..., 3] * 2 + w.select(-1, 2) + w.unbind(2)[1],
    "slices and rows of a transposed stack": lambda x, w: (
        w.mT[1:3][1] * w.mT[0, 3] + w.mT[1:3, 2][1] + w.mT[torch.tensor([1]), :2].sum()
    ),
    "rows of a transposed stack": lambda x, w: (
        w.mT.narrow(1, 0, ROWS)[1] * w.mT.split(ROWS, 1)[1].sum() * x[0, 0, :ROWS]
    ),
    "all entries": lambda x, w: (w * 2).sum((0, 1)) * x[0],
    "einsum": lambda x, w: torch.einsum("etc,erc->etr", x, w),
    "baddbmm": lambda x, w: torch.baddbmm(x[:, :, :ROWS], x, w.mT),
    "of views of views": lambda x, w: F.linear(x[1], w.view(-1, COLUMNS)[ROWS : 2 * ROWS]),
}


# torch's own grouped_mm takes no float64 and cannot be differentiated twice.
DENSE = {grouped: grouped_by_loop}


def results(function, module, mask=None):
    """The output and the gradients of one function of inputs and a stack, which is dense or not."""
    if mask is not None and module.weight.dtype == torch.float64:
        function = DENSE.get(function, function)
    inputs = torch.randn(
        EXPERTS,
        TOKENS,
        COLUMNS,
        dtype=module.weight.dtype,
        generator=torch.Generator().manual_seed(1),
    ).requires_grad_()
    output = function(inputs, module.weight)
    output.square().sum().backward()
    (leaf,) = module.parameters()
    return output, inputs.grad, leaf.grad if mask is None else leaf.grad[mask]


@pytest.mark.parametrize("index_format", FORMATS)
@pytest.mark.parametrize("name", [*WITHOUT_A_DENSE_STACK, *OTHERS])
def test_outputs_and_gradients_are_those_of_dense_experts(name, index_format, monkeypatch):
    monkeypatch.setattr(convert, "layout_of", FORMATS[index_format].from_mask)
    function = (WITHOUT_A_DENSE_STACK | OTHERS)[name]
    sparse, dense, mask = stacks()
    found, expected = results(function, sparse), results(function, dense, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WITHOUT_A_DENSE_STACK)
def test_no_stack_is_ever_dense(name, monkeypatch):
    sparse, *_ = stacks(dtype=torch.float32)
    shapes, densify, compress = [], Layout.densify, Layout.compress
    monkeypatch.setattr(Layout, "densify", lambda *a: shapes.append(a[0].shape) or densify(*a))
    monkeypatch.setattr(Layout, "compress", lambda *a: shapes.append(a[0].shape) or compress(*a))
    results(WITHOUT_A_DENSE_STACK[name], sparse)
    with torch.no_grad():
        WITHOUT_A_DENSE_STACK[name](torch.randn(EXPERTS, TOKENS, COLUMNS), sparse.weight)
    assert shapes == []


@pytest.mark.parametrize("name", WITHOUT_A_DENSE_STACK)
@pytest.mark.parametrize("compute", ["sparse", "dense"])
def test_products_in_float32(name, compute):
    sparse, dense, mask = stacks(dtype=torch.float32)
    sparsify(sparse, {"weight": mask}, compute=compute)
    function = WITHOUT_A_DENSE_STACK[name]
    found, expected = results(function, sparse), results(function, dense, mask)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    beyond=st.integers(0, 3),
    rows=st.integers(1, 70),
    columns=st.sampled_from([64, 65, 256, 300]),
    transposed=st.booleans(),
)
def test_groups_of_any_sizes(tokens, beyond, rows, columns, transposed):
    sparse, dense, mask = stacks(shape=(len(tokens), rows, columns))
    ends = torch.tensor(tokens).cumsum(0).int()
    groups = [slice(end - size, end) for end, size in zip(ends.tolist(), tokens, strict=True)]
    width = rows if transposed else columns
    found = []
    for module in (sparse, dense):
        weight = module.weight if transposed else module.weight.mT
        inputs = torch.ones(sum(tokens) + beyond, width, dtype=torch.float64, requires_grad=True)
        if module is sparse:
            output = F.grouped_mm(inputs, weight, offs=ends)[: ends[-1]]
        else:
            output = torch.cat([inputs[rows] @ weight[e] for e, rows in enumerate(groups)])
        output.pow(2).sum().backward()
        (leaf,) = module.parameters()
        found.append((output, inputs.grad, leaf.grad if module is sparse else leaf.grad[mask]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def twice_differentiated(function, module, mask=None):
    inputs = torch.ones(EXPERTS, TOKENS, COLUMNS, dtype=torch.float64, requires_grad=True)
    (leaf,) = module.parameters()
    function = function if mask is None else DENSE.get(function, function)
    loss = function(inputs, module.weight).pow(3).sum()
    gradients = torch.autograd.grad(loss, (inputs, leaf), create_graph=True)
    for_leaf = gradients[1] if mask is None else gradients[1][mask]
    (gradients[0].square().sum() + for_leaf.square().sum()).backward()
    return inputs.grad, leaf.grad if mask is None else leaf.grad[mask]


@pytest.mark.parametrize("name", ["linear of a number", "bmm", "grouped_mm", "numbers"])
def test_double_backward(name):
    sparse, dense, mask = stacks()
    function = WITHOUT_A_DENSE_STACK[name]
    found = twice_differentiated(function, sparse)
    expected = twice_differentiated(function, dense, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear of a number", "unbind", "bmm", "grouped_mm", "numbers"])
def test_autocast_and_16_bits(name):
    function = WITHOUT_A_DENSE_STACK[name]
    sparse, dense, mask = stacks(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = results(function, sparse), results(function, dense, mask)
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.5)
    sparse, dense, mask = stacks(dtype=torch.bfloat16)
    found, expected = results(function, sparse), results(function, dense, mask)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=2, check_dtype=False)
    assert found[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["linear of a number", "unbind", "bmm", "grouped_mm", "numbers"])
def test_a_resident_copy_a_frozen_stack_and_saved_tensors_elsewhere(name):
    function = WITHOUT_A_DENSE_STACK[name]
    sparse, dense, mask = stacks()
    expected = results(function, dense, mask)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(results(function, sparse), expected, rtol=1e-12, atol=1e-12)
    sparsify(sparse, {"weight": mask}, compute="samo")
    sparse.zero_grad()
    torch.testing.assert_close(results(function, sparse), expected, rtol=1e-12, atol=1e-12)
    sparse.requires_grad_(False).zero_grad()
    *found, for_weight = results(function, sparse)
    torch.testing.assert_close(found, list(expected[:2]), rtol=1e-12, atol=1e-12)
    assert for_weight is None


@pytest.mark.parametrize(
    "index",
    [EXPERTS, -EXPERTS - 1, torch.tensor(EXPERTS), torch.tensor([0, EXPERTS]), 1.5, (0, ROWS)],
)
def test_an_index_out_of_range_raises_as_for_a_dense_tensor(index):
    sparse, dense, _ = stacks()
    with pytest.raises(Exception) as expected:
        dense.weight[index]
    with pytest.raises(type(expected.value)):
        sparse.weight[index]


def test_rows_of_fewer_than_64_entries_run_dense():
    sparse, dense, mask = stacks(shape=(EXPERTS, ROWS, 9))
    found = []
    for module in (sparse, dense):
        inputs = torch.ones(3, 9, dtype=torch.float64)
        F.linear(inputs, module.weight[1]).square().sum().backward()
        (leaf,) = module.parameters()
        found.append(leaf.grad if module is sparse else leaf.grad[mask])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_stack_is_multiplied_under_autocast_in_inference_mode():
    sparse, dense, _ = stacks(dtype=torch.float32)
    x = torch.randn(EXPERTS, TOKENS, ROWS)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        found, expected = (torch.bmm(x, each.weight) for each in (sparse, dense))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
