"""Products with a sparse weight in panels: the dense weight's numbers, a part dense at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_axosparse.sparse import layout as layout_module
from lightning_axosparse.sparse import product
from lightning_axosparse.sparse import weight as weight_module
from lightning_axosparse.sparse.formats import FORMATS, layout_of
from lightning_axosparse.sparse.layout import Layout
from lightning_axosparse.sparse.scratch import scratch
from lightning_axosparse.sparse.weight import SparseWeight, sparse_weight

ROWS, COLUMNS = 130, 96


@pytest.fixture(autouse=True)
def never_whole(monkeypatch):
    """Tiles of one block (four of them here), and no way to a dense weight or gradient."""
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(weight_module, "OWN_WAY_ENTRIES", 0)

    def refuse(*_):
        raise AssertionError("a whole weight was made dense, or a whole gradient")

    monkeypatch.setattr(Layout, "densify", refuse)
    monkeypatch.setattr(Layout, "compress", refuse)


def allow_whole(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(weight_module, "OWN_WAY_ENTRIES", 0)


def pair(index_format=None, dtype=torch.float32):
    """The kept values of a weight, their layout, the mask, and the dense weight as a leaf."""
    torch.manual_seed(0)
    mask = torch.rand(ROWS, COLUMNS) < 0.2
    mask[40:80] = False
    values = nn.Parameter(torch.randn(int(mask.sum()), dtype=dtype))
    dense = torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, values.detach())
    layout = layout_of(mask, index_format)
    assert len(layout.tiles) == 4
    return values, layout, mask, dense.requires_grad_()


LINEAR = {
    "linear": (lambda x, w: F.linear(x, w), COLUMNS),
    "bias": (lambda x, w: F.linear(x, w, torch.arange(ROWS).to(x.dtype)), COLUMNS),
    "matmul with the transposed": (lambda x, w: x @ w.t(), COLUMNS),
    "matmul": (lambda x, w: torch.matmul(x, w), ROWS),
    "operator": (lambda x, w: x @ w, ROWS),
    "method": (lambda x, w: x.matmul(w), ROWS),
    "linear with the transposed": (lambda x, w: F.linear(x, w.t()), ROWS),
}
MATRICES = {
    "mm": (lambda x, w: torch.mm(x, w.mT), COLUMNS),
    "addmm": (lambda x, w: torch.addmm(torch.ones(COLUMNS, dtype=x.dtype), x, w), ROWS),
}


def agree(function, inputs, dtype=torch.float32, index_format=None, **tolerance):
    values, layout, mask, dense = pair(index_format, dtype)
    results = []
    for weight, leaf in ((sparse_weight(values, layout), values), (dense, dense)):
        x = inputs.detach().to(dtype).requires_grad_()
        output = function(x, weight)
        (output.float() * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        gradient = leaf.grad if leaf is values else leaf.grad[mask]
        results.append((output, x.grad, gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_linear_functions(name, leading):
    function, width = LINEAR[name]
    agree(function, torch.randn(*leading, width))


@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_the_gradient_of_a_bias(leading):
    values, layout, _, dense = pair()
    biases = [nn.Parameter(torch.zeros(ROWS)) for _ in range(2)]
    inputs = torch.randn(*leading, COLUMNS)
    for weight, bias in zip((sparse_weight(values, layout), dense), biases, strict=True):
        F.linear(inputs, weight, bias).sin().sum().backward()
    torch.testing.assert_close(biases[0].grad, biases[1].grad)


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_functions(name):
    function, width = MATRICES[name]
    agree(function, torch.randn(7, width))


NAMED = {
    "linear": lambda x, w: F.linear(input=x, weight=w, bias=torch.ones(ROWS)),
    "mm": lambda x, w: torch.mm(input=x, mat2=w.t()),
    "matmul": lambda x, w: torch.matmul(input=x, other=w.t()),
    "method": lambda x, w: x.matmul(other=w.t()),
    "addmm": lambda x, w: torch.addmm(input=torch.ones(ROWS), mat1=x, mat2=w.t()),
}


@pytest.mark.parametrize("name", NAMED)
def test_arguments_by_the_names_that_torch_gives_them(name):
    agree(NAMED[name], torch.randn(7, COLUMNS))


def test_a_product_into_given_memory(monkeypatch):
    values, layout, _, dense = pair()
    allow_whole(monkeypatch)
    weight, inputs = sparse_weight(values.detach(), layout), torch.randn(7, COLUMNS)
    out = torch.empty(7, ROWS)
    assert torch.mm(inputs, weight.t(), out=out) is out
    torch.testing.assert_close(out, inputs @ dense.detach().t())


@pytest.mark.parametrize("index_format", FORMATS)
def test_formats(index_format):
    agree(F.linear, torch.randn(3, COLUMNS), index_format=index_format)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["bias", "matmul"])
def test_dtypes(name, dtype, monkeypatch):
    if dtype == torch.bfloat16:
        allow_whole(monkeypatch)
    function, width = LINEAR[name]
    agree(function, torch.randn(6, width), dtype)


@pytest.mark.parametrize(("n", "panels"), [(3, 4), (40, 2), (100, 1)])
@pytest.mark.parametrize("name", ["bias", "linear", "linear with the transposed"])
def test_as_much_is_dense_at_a_time_as_the_activations_take(name, n, panels, monkeypatch):
    taken = []

    def take(use, numel, *args):
        taken.append((use, numel))
        return scratch.take(use, numel, *args)

    monkeypatch.setattr(product, "scratch", SimpleNamespace(take=take))
    function, width = LINEAR[name]
    agree(function, torch.randn(n, width), rtol=1e-4, atol=1e-4)
    sizes = [numel for use, numel in taken if use == "tile"]
    assert len(sizes) == 3 * panels  # forward, and both gradients
    assert sum(sizes) == 3 * ROWS * COLUMNS
    tile = layout_module.block_entries(torch.Size((ROWS, COLUMNS)))
    assert max(sizes) <= max(tile, n * (ROWS + COLUMNS))


def test_a_panel_has_a_most(monkeypatch):
    monkeypatch.setattr(product, "PANEL_ENTRIES", 9000)
    _, layout, _, _ = pair()
    assert [len(panel.tiles) for panel in product._panels(layout, 10**6)] == [2, 2]


def test_inputs_of_any_strides():
    agree(F.linear, torch.randn(COLUMNS, 4, 3).permute(2, 1, 0))


def test_no_inputs():
    agree(F.linear, torch.randn(0, COLUMNS))


def test_a_weight_used_twice_and_read_once():
    agree(lambda x, w: F.linear(x, w) @ w, torch.randn(5, COLUMNS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    agree(
        lambda x, w: checkpoint(F.linear, x, w, use_reentrant=use_reentrant),
        torch.randn(5, COLUMNS),
    )


def test_autocast_computes_in_its_dtype(monkeypatch):
    allow_whole(monkeypatch)

    def cast(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            output = F.linear(x, w, torch.ones(ROWS))
        assert output.dtype == torch.bfloat16
        return output

    agree(cast, torch.randn(5, COLUMNS))


def test_a_frozen_input_and_a_frozen_weight():
    values, layout, mask, dense = pair()
    inputs = torch.randn(4, COLUMNS)
    F.linear(inputs, sparse_weight(values, layout)).sum().backward()
    F.linear(inputs, dense).sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])
    frozen = sparse_weight(values.detach(), layout)
    assert not F.linear(inputs, frozen).requires_grad
    inputs.requires_grad_()
    F.linear(inputs, frozen).sum().backward()
    torch.testing.assert_close(inputs.grad, dense.detach().sum(0).expand_as(inputs))


def test_the_gradient_of_a_read_has_the_kept_entries_alone():
    values, layout, mask, dense = pair()
    weight, inputs = sparse_weight(values, layout), torch.randn(4, COLUMNS)
    (gradient,) = torch.autograd.grad(F.linear(inputs, weight).sum(), weight)
    assert isinstance(gradient, SparseWeight)
    (expected,) = torch.autograd.grad(F.linear(inputs, dense).sum(), dense)
    torch.testing.assert_close(gradient.kept, expected[mask])


def test_double_backward():
    # Cubes of sums cancel: in float32 the order of the sums shows in the third digit.
    values, layout, mask, dense = pair(dtype=torch.float64)
    inputs = torch.randn(3, COLUMNS, dtype=torch.float64)
    for weight, leaf in ((sparse_weight(values, layout), values), (dense, dense)):
        x = inputs.clone().requires_grad_()
        loss = F.linear(x, weight).pow(3).sum()
        first = torch.autograd.grad(loss, (x, leaf), create_graph=True)
        kept = first[1] if leaf is values else first[1][mask]
        (first[0].square().sum() + kept.square().sum()).backward()
    torch.testing.assert_close(values.grad, dense.grad[mask], rtol=1e-12, atol=1e-9)


def test_saved_tensors_moved_to_cpu_come_back_dense(monkeypatch):
    allow_whole(monkeypatch)

    def saved(x, w):
        with torch.autograd.graph.save_on_cpu():
            return F.linear(x, w)

    agree(saved, torch.randn(3, COLUMNS))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: F.linear(torch.ones(2, 5), w),
        lambda w: F.linear(torch.ones(2, COLUMNS), w, torch.ones(3)),
        lambda w: F.linear(torch.ones(2, COLUMNS, dtype=torch.float64), w),
    ],
)
def test_what_does_not_fit_is_refused_in_torchs_words(wrong, monkeypatch):
    values, layout, _, dense = pair()
    monkeypatch.undo()
    with pytest.raises(RuntimeError) as expected:
        wrong(dense)
    with pytest.raises(RuntimeError, match=r"^" + str(expected.value)[:20]):
        wrong(sparse_weight(values, layout))
