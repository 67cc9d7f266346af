"""Products with a sparse weight, in a layer and of a read weight, give a dense weight's numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_axosparse import densify, sparsify
from lightning_axosparse.pipeline.stage_forward import PipelinedLayers
from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.sparse.ops import panels, torch_functions
from lightning_axosparse.sparse.store import layout as layout_module
from lightning_axosparse.sparse.store.formats import FORMATS, layout_of
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import DenseForm
from lightning_axosparse.sparse.store.scratch import scratch
from lightning_axosparse.sparse.store.weight import SparseWeight
from tests.sparse.masking import random_masks, sparse_and_dense


class Doubling(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


class Renamed(nn.Linear):
    """Another class, but the library's forward."""


def sparse_and_dense_layer(module):
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


def layers_agree(module, *shape, **options):
    sparse, dense = sparse_and_dense_layer(module)
    ours, theirs = differentiate(sparse, *shape, **options), differentiate(dense, *shape, **options)
    torch.testing.assert_close(ours, theirs)
    if dense.weight.grad is not None:
        expected = layouts(sparse)["weight"].compress(dense.weight.grad)
        torch.testing.assert_close(sparse._parameters["weight"].grad, expected)


@pytest.mark.parametrize("make", [nn.Linear, Renamed, lambda i, o: Conv1D(o, i)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 0), (2, 3)])
def test_the_weight_is_not_read(make, leading, reads):
    layers_agree(make(6, 10), *leading, 6)
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
    layers_agree(nn.Linear(6, 10), 3, 6, frozen=(frozen,))
    assert not reads


def test_without_gradients_and_without_bias(reads):
    sparse, dense = sparse_and_dense_layer(nn.Linear(6, 10, bias=False))
    with torch.no_grad():
        torch.testing.assert_close(sparse(torch.ones(2, 6)), dense(torch.ones(2, 6)))
    assert not reads


def test_a_forward_of_ones_own_reads_the_weight(reads):
    layers_agree(Doubling(6, 10), 3, 6)
    assert reads


def test_a_sparse_bias_is_read(reads):
    module = nn.Linear(6, 10)
    mask = torch.arange(10) % 2 == 0
    sparsify(module, {"weight": torch.ones(10, 6, dtype=torch.bool), "bias": mask})
    output = module(torch.ones(6))
    torch.testing.assert_close(output, F.linear(torch.ones(6), module.weight, module.bias))
    assert reads


@pytest.mark.parametrize(
    "inputs", [torch.ones(2, 5), torch.ones(2, 6, dtype=torch.float64), torch.ones(())]
)
def test_a_layer_raises_torchs_errors(inputs):
    sparse, dense = sparse_and_dense_layer(nn.Linear(6, 10))
    with pytest.raises(RuntimeError) as theirs:
        dense(inputs)
    with pytest.raises(RuntimeError) as ours:
        sparse(inputs)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_autocast_casts_no_more_than_for_a_dense_layer(dtype):
    for layer in sparse_and_dense_layer(nn.Linear(6, 10)):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
            layer(torch.ones(2, 6, dtype=dtype))


ROWS, COLUMNS = 130, 96


@pytest.fixture(params=["dense", "sparse"])
def compute(request, monkeypatch):
    """How products with a weight that is read here run."""
    monkeypatch.setattr(DenseForm, "backend", Backend(request.param))
    return request.param


@pytest.fixture
def several_tiles(compute, monkeypatch):
    """Tiles of one block (four of them here), and a read weight of any size takes this path."""
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0)


@pytest.fixture
def never_whole(several_tiles, monkeypatch):
    """Fails the test if a whole weight is materialized, or a whole gradient compressed."""

    def fail(*_):
        raise AssertionError("a whole weight was materialized, or a whole gradient compressed")

    monkeypatch.setattr(Layout, "densify", fail)
    monkeypatch.setattr(Layout, "compress", fail)


never_dense = pytest.mark.usefixtures("never_whole")
in_panels = pytest.mark.usefixtures("several_tiles")


def read(values, layout):
    form = DenseForm(values.dtype, backend=DenseForm.backend)
    return torch_functions.read_weight(values, layout, form)


def pair(index_format=None, dtype=torch.float32):
    """The unpruned values of a weight, their layout, the mask, and the dense weight as a leaf."""
    torch.manual_seed(0)
    mask = torch.rand(ROWS, COLUMNS) < 0.2
    mask[40:80] = False
    values = nn.Parameter(torch.randn(int(mask.sum()), dtype=dtype))
    dense = torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, values.detach())
    layout = layout_of(mask, index_format)
    assert len(layout.tiles) == 4
    return values, layout, mask, dense.requires_grad_()


FUNCTIONS = {
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
    "named linear": (lambda x, w: F.linear(input=x, weight=w, bias=torch.ones(ROWS)), COLUMNS),
    "named mm": (lambda x, w: torch.mm(input=x, mat2=w.t()), COLUMNS),
    "named matmul": (lambda x, w: torch.matmul(input=x, other=w.t()), COLUMNS),
    "named method": (lambda x, w: x.matmul(other=w.t()), COLUMNS),
    "named addmm": (
        lambda x, w: torch.addmm(input=torch.ones(ROWS), mat1=x, mat2=w.t()),
        COLUMNS,
    ),
}


def agree(function, inputs, dtype=torch.float32, index_format=None, **tolerance):
    values, layout, mask, dense = pair(index_format, dtype)
    results = []
    for weight, leaf in ((read(values, layout), values), (dense, dense)):
        x = inputs.detach().to(dtype).requires_grad_()
        output = function(x, weight)
        (output.float() * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        gradient = leaf.grad if leaf is values else leaf.grad[mask]
        results.append((output, x.grad, gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@never_dense
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("leading", [(), (0,), (5,), (2, 3)])
def test_linear_functions(name, leading):
    function, width = FUNCTIONS[name]
    agree(function, torch.randn(*leading, width))


@never_dense
@pytest.mark.parametrize("leading", [(), (5,), (2, 3)])
def test_the_gradient_of_a_bias(leading):
    values, layout, _, dense = pair()
    biases = [nn.Parameter(torch.zeros(ROWS)) for _ in range(2)]
    inputs = torch.randn(*leading, COLUMNS)
    for weight, bias in zip((read(values, layout), dense), biases, strict=True):
        F.linear(inputs, weight, bias).sin().sum().backward()
    torch.testing.assert_close(biases[0].grad, biases[1].grad)


@never_dense
@pytest.mark.parametrize("name", MATRICES)
def test_functions_of_matrices_and_arguments_by_the_names_that_torch_gives_them(name):
    function, width = MATRICES[name]
    agree(function, torch.randn(7, width))


@in_panels
def test_a_product_into_given_memory():
    values, layout, _, dense = pair()
    weight, inputs = read(values.detach(), layout), torch.randn(7, COLUMNS)
    out = torch.empty(7, ROWS)
    assert torch.mm(inputs, weight.t(), out=out) is out
    torch.testing.assert_close(out, inputs @ dense.detach().t())


@never_dense
@pytest.mark.parametrize("index_format", FORMATS)
def test_formats(index_format):
    agree(F.linear, torch.randn(3, COLUMNS), index_format=index_format)


@pytest.mark.usefixtures("compute")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["bias", "matmul"])
def test_dtypes(name, dtype, request):
    request.getfixturevalue("several_tiles" if dtype == torch.bfloat16 else "never_whole")
    function, width = FUNCTIONS[name]
    agree(function, torch.randn(6, width), dtype)


@pytest.fixture
def taken(monkeypatch):
    """The use and the size of all scratch memory that products took."""
    taken = []

    def take(use, numel, *args):
        taken.append((use, numel))
        return scratch.take(use, numel, *args)

    monkeypatch.setattr(panels, "scratch", SimpleNamespace(take=take))
    return taken


@never_dense
@pytest.mark.parametrize("compute", ["dense"], indirect=True)
@pytest.mark.parametrize(("n", "number"), [(3, 4), (40, 2), (100, 1)])
@pytest.mark.parametrize("name", ["bias", "linear", "linear with the transposed"])
def test_as_much_is_dense_at_a_time_as_the_activations_take(name, n, number, taken):
    function, width = FUNCTIONS[name]
    agree(function, torch.randn(n, width), rtol=1e-4, atol=1e-4)
    sizes = [numel for use, numel in taken if use == "tile"]
    assert len(sizes) == 3 * number  # forward, and both gradients
    assert sum(sizes) == 3 * ROWS * COLUMNS
    tile = layout_module.block_entries(torch.Size((ROWS, COLUMNS)))
    assert max(sizes) <= max(tile, n * (ROWS + COLUMNS))


@never_dense
@pytest.mark.parametrize("compute", ["dense"], indirect=True)
def test_a_panel_has_a_most(taken, monkeypatch):
    monkeypatch.setattr(panels, "PANEL_ENTRIES", 9000)
    agree(F.linear, torch.randn(100, COLUMNS), rtol=1e-4, atol=1e-4)
    tiles = [tile.numel for tile in pair()[1].tiles]
    expected = [sum(tiles[:2]), sum(tiles[2:])]
    assert len(tiles) == 4
    assert [numel for use, numel in taken if use == "tile"] == 3 * expected


@never_dense
def test_inputs_of_any_strides():
    agree(F.linear, torch.randn(COLUMNS, 4, 3).permute(2, 1, 0))


@never_dense
def test_a_weight_used_twice_and_read_once():
    agree(lambda x, w: F.linear(x, w) @ w, torch.randn(5, COLUMNS), rtol=1e-4, atol=1e-4)


@never_dense
def test_a_frozen_input_and_a_frozen_weight():
    values, layout, mask, dense = pair()
    inputs = torch.randn(4, COLUMNS)
    F.linear(inputs, read(values, layout)).sum().backward()
    F.linear(inputs, dense).sum().backward()
    torch.testing.assert_close(values.grad, dense.grad[mask])
    frozen = read(values.detach(), layout)
    assert not F.linear(inputs, frozen).requires_grad
    inputs.requires_grad_()
    F.linear(inputs, frozen).sum().backward()
    torch.testing.assert_close(inputs.grad, dense.detach().sum(0).expand_as(inputs))


@never_dense
def test_the_gradient_of_a_read_has_the_kept_entries_alone():
    values, layout, mask, dense = pair()
    weight, inputs = read(values, layout), torch.randn(4, COLUMNS)
    (gradient,) = torch.autograd.grad(F.linear(inputs, weight).sum(), weight)
    assert isinstance(gradient, SparseWeight)
    (expected,) = torch.autograd.grad(F.linear(inputs, dense).sum(), dense)
    torch.testing.assert_close(gradient.stored_values, expected[mask])


@never_dense
def test_double_backward():
    # Cubes of sums cancel: in float32 the order of the sums shows in the third digit.
    values, layout, mask, dense = pair(dtype=torch.float64)
    inputs = torch.randn(3, COLUMNS, dtype=torch.float64)
    for weight, leaf in ((read(values, layout), values), (dense, dense)):
        x = inputs.clone().requires_grad_()
        loss = F.linear(x, weight).pow(3).sum()
        first = torch.autograd.grad(loss, (x, leaf), create_graph=True)
        unpruned = first[1] if leaf is values else first[1][mask]
        (first[0].square().sum() + unpruned.square().sum()).backward()
    torch.testing.assert_close(values.grad, dense.grad[mask], rtol=1e-12, atol=1e-9)


@in_panels
@pytest.mark.parametrize(
    "wrong",
    [
        lambda w: F.linear(torch.ones(2, 5), w),
        lambda w: F.linear(torch.ones(2, COLUMNS), w, torch.ones(3)),
        lambda w: F.linear(torch.ones(2, COLUMNS, dtype=torch.float64), w),
    ],
)
def test_wrong_operands_raise_torchs_errors(wrong):
    values, layout, _, dense = pair()
    with pytest.raises(RuntimeError) as expected:
        wrong(dense)
    with pytest.raises(RuntimeError, match=r"^" + str(expected.value)[:20]):
        wrong(read(values, layout))
