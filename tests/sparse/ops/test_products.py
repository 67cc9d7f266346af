from __future__ import annotations

import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_axosparse import sparsify
from lightning_axosparse.sparse import backend as backend
from lightning_axosparse.sparse.backend import COMPUTES, Backend
from lightning_axosparse.sparse.kernels import one_token, products
from lightning_axosparse.sparse.ops import panels
from lightning_axosparse.sparse.ops import products as sparse_products
from lightning_axosparse.sparse.ops.products import should_run
from lightning_axosparse.sparse.store.formats import FORMATS, SegmentLayout, layout_of
from lightning_axosparse.support import threads as threads_module
from tests.ranks import PATIENCE, warm_python
from tests.sparse.masking import close, random_masks, sparse_and_dense

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
widths = st.sampled_from([64, 96, 255, 256, 257, 600])
tokens = st.sampled_from([0, 1, 2, 8, 9, 15, 16, 17, 63, 64, 65, 100, 130, 300])


def weight(height, width, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(height, width, generator=generator) < density
    mask[1::5] = False  # rows of which all entries are pruned
    dense = torch.randn(height, width, generator=generator).where(mask, torch.zeros(()))
    layout = layout_of(mask, "segments")
    return dense, layout, layout.compress(dense)


@settings(max_examples=60, deadline=None)
@given(
    height=st.sampled_from([1, 3, 16, 63, 64, 65, 130, 300]),
    width=widths,
    n=tokens,
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_dense_weight(height, width, n, density, biased, seed):
    dense, layout, values = weight(height, width, density, seed)
    inputs, gradient = torch.randn(n, width), torch.randn(n, height)
    out, back = (torch.randn(size) if biased else None for size in (height, width))
    found = sparse_products.spmm_t(inputs, values, layout, out)
    close(found, F.linear, inputs, dense, *([out] if biased else []))
    found = sparse_products.spmm(gradient, values, layout, back)
    close(found, F.linear, gradient, dense.t(), *([back] if biased else []))
    found = sparse_products.sddmm(gradient, inputs, layout)
    close(found, lambda g, x: layout.compress(g.t() @ x), gradient, inputs)


@pytest.mark.parametrize("n", [1, 16, 65, 200])
def test_an_entry_of_a_gradient_depends_on_no_other(n):
    left, right = torch.randn(n, 70), torch.randn(n, 300)
    mask = torch.rand(70, 300) < 0.3
    some = mask & (torch.rand(70, 300) < 0.4)
    both = [layout_of(m, "segments") for m in (mask, some)]
    every, few = (layout.densify(sparse_products.sddmm(left, right, layout)) for layout in both)
    assert torch.equal(few, every * some)


@pytest.fixture(params=["by_segments", "by_columns"])
def loop(request, monkeypatch):
    """Multiplies one token by this loop, whether or not it is this processor's."""
    if request.param == "by_segments" and not one_token.HAS_AVX512:
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(one_token, "one_token_spmm_t", getattr(one_token, request.param))


@pytest.mark.parametrize("height", [1, 16, 45])
@pytest.mark.parametrize("width", [64, 255, 256, 257, 600])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.usefixtures("loop")
def test_one_token_reads_no_input_of_a_pruned_weight(height, width, density):
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(height, width, generator=generator) < density
    mask[:, ::3] = False
    layout, values = layout_of(mask, "segments"), torch.randn(int(mask.sum()))
    inputs = torch.randn(1, width)
    dense, bias = layout.densify(values), torch.randn(height)
    close(
        sparse_products.spmm_t(unused(inputs), values, layout, bias),
        F.linear,
        inputs,
        dense,
        bias,
    )


def unused(inputs):
    """Return inputs of which every third is not a number."""
    return inputs.where(torch.arange(inputs.shape[1]) % 3 != 0, torch.tensor(float("nan")))


def test_operands_of_any_strides():
    dense, layout, values = weight(65, 96, 0.3)
    inputs, gradient = torch.randn(96, 40).t(), torch.randn(40, 130)[:, ::2]
    close(sparse_products.spmm_t(inputs, values, layout), F.linear, inputs, dense)
    close(sparse_products.spmm(gradient, values, layout), torch.mm, gradient, dense)
    found = sparse_products.sddmm(gradient, inputs, layout)
    close(found, lambda g, x: layout.compress(g.t() @ x), gradient, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_same_with_any_number_of_threads(dtype, threads, monkeypatch):
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    _, layout, values = weight(200, 700, 0.2)
    operands = torch.randn(300, 700), torch.randn(300, 200), values, torch.randn(200)
    inputs, gradient, values, bias = (operand.to(dtype) for operand in operands)
    results = []
    for number in (1, 2, 3, 5):
        threads(number)
        results.append(
            (
                sparse_products.spmm_t(inputs, values, layout, bias),
                sparse_products.spmm_t(inputs[:1], values, layout, bias),
                sparse_products.spmm(gradient, values, layout),
                sparse_products.spmm(gradient[:1], values, layout),
                sparse_products.sddmm(gradient, inputs, layout),
            )
        )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 16, 17, 70])
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(n, dtype):
    _, layout, values = weight(270, 300, 0.2)
    # With more tokens in bfloat16, another instruction adds pairs.
    number = 300 if dtype == torch.float32 else 120
    operands = torch.randn(number, 300), torch.randn(number, 270), values
    inputs, gradient, values = (operand.to(dtype) for operand in operands)
    whole = sparse_products.spmm_t(inputs, values, layout)
    assert torch.equal(sparse_products.spmm_t(inputs[:n], values, layout), whole[:n])
    whole = sparse_products.spmm(gradient, values, layout)
    for tokens in (1, n):
        assert torch.equal(sparse_products.spmm(gradient[:tokens], values, layout), whole[:tokens])


@pytest.mark.parametrize("number", [1, 2])
def test_a_large_weight_is_transposed_in_parts(number, threads, monkeypatch):
    threads(number)
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    _, layout, values = weight(300, 1100, 0.3)
    gradient, bias = torch.randn(300, 300), torch.randn(1100)
    whole = sparse_products.spmm(gradient, values, layout, bias)
    sizes, take = [], sparse_products._memory_of_transpose
    monkeypatch.setattr(
        sparse_products, "_memory_of_transpose", lambda nnz, t: sizes.append(nnz) or take(nnz, t)
    )
    monkeypatch.setattr(sparse_products, "ENTRIES_OF_A_TRANSPOSE", layout.nnz // 3)
    assert torch.equal(sparse_products.spmm(gradient, values, layout, bias), whole)
    assert len(sizes) > 2
    assert max(sizes) < layout.nnz // 2


def test_loading_the_loops_compiles_what_products_of_any_size_run():
    sparse_products.load_loops.cache_clear()
    sparse_products.load_loops()
    of_one_token = one_token.one_token_spmm_t, one_token.one_token_spmm
    loaded = [len(loop.signatures) for loop in of_one_token]  # int8 values have one of their own
    _, layout, values = weight(130, 600, 0.2)
    for n in (1, 70, 300):
        inputs, gradient = torch.randn(600, n).t(), torch.randn(n, 130)
        sparse_products.spmm_t(inputs, values, layout, torch.zeros(130))
        sparse_products.spmm(gradient, nn.Parameter(values), layout, torch.zeros(600))
        sparse_products.sddmm(gradient, inputs, layout)
        halves = inputs.bfloat16(), gradient.bfloat16(), values.bfloat16()
        sparse_products.spmm_t(halves[0], halves[2], layout, torch.zeros(130))
        sparse_products.spmm(halves[1], halves[2], layout)
        sparse_products.sddmm(halves[1], halves[0], layout)
    dtypes = 2 if products.HAS_BFLOAT16 else 1
    assert {
        loop.__name__: len(loop.signatures)
        for loop in (products.spmm_t, products.spmm, products.sddmm)
    } == {"spmm_t": dtypes, "spmm": 1, "sddmm": dtypes}
    assert [len(loop.signatures) for loop in of_one_token] == loaded
    assert len(products.transposed_spmm_t.signatures) == dtypes


@pytest.mark.parametrize("has_bfloat16", [False, products.HAS_BFLOAT16])
def test_loading_the_loops_loads_that_of_panels(has_bfloat16, monkeypatch):
    monkeypatch.setattr(products, "HAS_BFLOAT16", has_bfloat16)
    dtypes, densify = [], SegmentLayout.densify
    monkeypatch.setattr(
        SegmentLayout,
        "densify",
        lambda layout, values: dtypes.append(values.dtype) or densify(layout, values),
    )
    sparse_products.load_loops.cache_clear()
    sparse_products.load_loops()
    assert dtypes == [torch.float32]


@pytest.fixture
def loaded(monkeypatch):
    """How often a conversion loaded the loops."""
    calls = []
    monkeypatch.setattr(sparse_products, "load_loops", lambda: calls.append(None))
    return calls


@pytest.mark.parametrize("density", [0.2, 0.9])
def test_a_conversion_loads_the_loops(density, loaded):
    sparsify(layer := nn.Linear(96, 130), random_masks(layer, density))
    assert loaded


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.Linear(96, 130), {"compute": "dense"}),
        (nn.Linear(96, 130), {"compute": "samo"}),
        (nn.Linear(96, 130, dtype=torch.float64), {}),
    ],
)
def test_a_conversion_loads_no_loops_that_nothing_would_run(layer, options, loaded):
    sparsify(layer, random_masks(layer, 0.2), **options)
    assert not loaded


def test_what_is_chosen():
    _, layout, values = weight(80, 100, 0.55)
    assert 0.4 < layout.nnz / 8000 < 0.5
    chosen = {
        (name, compute): should_run(layout, name, Backend(compute, "float32"), values)
        for name in ("spmm_t", "spmm", "sddmm")
        for compute in ("auto", "dense", "sparse")
    }
    assert {key for key, there in chosen.items() if there} == {
        ("spmm_t", "auto"),
        ("spmm_t", "sparse"),
        ("spmm", "sparse"),
        ("sddmm", "sparse"),
    }


@pytest.mark.parametrize("compute", COMPUTES)
def test_products_of_double_precision_run_on_panels(compute):
    _, layout, values = weight(80, 100, 0.1)
    assert not should_run(layout, "spmm", Backend(compute, "float32"), values.double())


@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@pytest.mark.parametrize(
    ("processor", "density", "there"),
    [
        ("dense", 0.05, ""),
        ("few", 0.05, "float32"),
        ("few", 0.4, ""),
        ("matrix", 0.05, "float32"),
        ("bfloat16", 0.05, "float32 16"),
        ("bfloat16", 0.24, "float32 16"),
        ("bfloat16", 0.9, ""),
        ("float32", 0.3, "float32 16"),
        ("float32", 0.9, ""),
    ],
)
def test_what_auto_chooses_depends_on_the_processor(processor, density, there, dtype):
    _, layout, values = weight(80, 100, density)
    for name in ("spmm_t", "spmm", "sddmm"):
        for compute, expected in (("auto", there), ("dense", ""), ("sparse", "float32 16")):
            choice = layout, name, Backend(compute, processor)
            assert should_run(*choice, values) == ("float32" in expected)
            in_16_bits = should_run(*choice, values.to(dtype))
            assert in_16_bits == ("16" in expected)


def integers(*shape, seed):
    """Return small numbers, whose products and sums float32 holds exactly, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(SIXTEEN_BITS),
    height=st.sampled_from([1, 3, 31, 64, 65, 130, 300]),
    width=widths,
    n=st.sampled_from([1, 2, 8, 31, 32, 33, 64, 100, 127, 128, 129, 300]),
    density=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_products_in_16_bits_are_those_in_float32_rounded(dtype, height, width, n, density, seed):
    _, layout, values = weight(height, width, density, seed)
    operands = (
        integers(n, width, seed=seed),
        integers(n, height, seed=seed + 1),
        integers(len(values), seed=seed + 2),
        integers(height, seed=seed + 3),
        integers(width, seed=seed + 4),
    )

    def results(inputs, gradient, values, bias, back):
        yield sparse_products.spmm_t(inputs, values, layout, bias)
        yield sparse_products.spmm(gradient, values, layout, back)
        yield sparse_products.sddmm(gradient, inputs, layout)

    rounded = results(*(operand.to(dtype) for operand in operands))
    for found, one in zip(rounded, results(*operands), strict=True):
        assert torch.equal(found, one.to(dtype))


@pytest.mark.parametrize("index_format", [name for name in FORMATS if name != "segments"])
def test_other_formats_are_multiplied_on_panels(index_format):
    layout = layout_of(torch.rand(80, 100) < 0.1, index_format)
    assert not should_run(layout, "spmm", Backend("sparse"), torch.zeros(1))


def test_rows_that_share_segments_are_multiplied_on_panels():
    layout = layout_of(torch.rand(80, 60) < 0.1)
    assert not should_run(layout, "spmm", Backend("sparse"), torch.zeros(1))


@pytest.fixture
def no_panels(monkeypatch):
    def fail(*_):
        raise AssertionError("a weight was materialized")

    for name in ("spmm_t", "spmm", "sddmm"):
        monkeypatch.setattr(panels, name, fail)


LAYERS = {
    "linear": lambda: nn.Linear(96, 130),
    "without bias": lambda: nn.Linear(96, 130, bias=False),
    "Conv1D": lambda: Conv1D(130, 96),
    "attention": lambda: nn.MultiheadAttention(128, 4, batch_first=True),
}


def output_of(layer, inputs):
    if isinstance(layer, nn.MultiheadAttention):
        return layer(inputs, inputs, inputs, need_weights=False)[0]
    return layer(inputs)


def assert_as_dense(name, density, forward, tolerance, dtype=torch.float32, compute="auto"):
    """Compare outputs and gradients of a sparse layer with those of a dense one.

    Args:
        forward: calls ``output_of``.
    """
    layer = LAYERS[name]().to(dtype)
    masks = random_masks(layer, density)
    results = []
    for one in sparse_and_dense(layer, masks, compute):
        inputs = torch.linspace(-1, 1, 2 * 20 * (128 if name == "attention" else 96))
        inputs = inputs.view(2, 20, -1).sin().to(dtype).requires_grad_()
        for _ in range(2):  # gradients of micro-batches add up
            output = forward(one, inputs)
            output.float().square().sum().backward()
        gradients = {
            key: p.grad.float() if p.grad.dim() == 1 else p.grad[masks[key]].float()
            for key, p in one.named_parameters()
            if key in masks
        }
        results.append((output.detach(), inputs.grad, gradients))
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("no_panels")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_give_a_dense_layers_numbers(name, recompute, monkeypatch):
    def forward(layer, inputs):
        if recompute:
            return torch.utils.checkpoint.checkpoint(output_of, layer, inputs, use_reentrant=False)
        return output_of(layer, inputs)

    monkeypatch.setattr("lightning_axosparse.sparse.ops.torch_functions.MIN_ENTRIES", 0)
    assert_as_dense(name, 0.2, forward, 1e-4)


@pytest.fixture(params=["matrix", "bfloat16", "float32"])
def processor(request, monkeypatch):
    """The kind of processor that this one is taken for."""
    monkeypatch.setattr(backend, "this_processor", lambda: request.param)
    return request.param


@pytest.mark.usefixtures("no_panels")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mixed", [False, True])
def test_layers_in_16_bits_multiply_by_kept_values(name, mixed, processor, monkeypatch):
    def forward(layer, inputs):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            output = output_of(layer, inputs)
        assert output.dtype == torch.bfloat16
        return output

    monkeypatch.setattr("lightning_axosparse.sparse.ops.torch_functions.MIN_ENTRIES", 0)
    dtype = torch.float32 if mixed else torch.bfloat16
    density = 0.08 if processor == "bfloat16" else 0.2
    compute = "sparse" if processor == "matrix" else "auto"
    assert_as_dense(name, density, forward, 0.05, dtype, compute)


@pytest.mark.usefixtures("no_panels")
@pytest.mark.parametrize("name", ["linear", "without bias", "Conv1D"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_token_is_multiplied_here_however_much_is_kept(name, dtype, monkeypatch):
    monkeypatch.setattr(backend, "this_processor", lambda: "bfloat16")
    layer, inputs = LAYERS[name]().to(dtype), torch.linspace(-1, 1, 96, dtype=dtype)
    with torch.no_grad():
        results = [
            one(inputs.view(1, 1, 96)) for one in sparse_and_dense(layer, random_masks(layer, 0.9))
        ]
    assert results[0].dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def test_a_read_weight_goes_the_way_that_ranks_agreed_on(processor, monkeypatch):
    monkeypatch.setattr("lightning_axosparse.sparse.ops.torch_functions.MIN_ENTRIES", 0)
    layer, inputs = nn.Linear(96, 130).bfloat16(), torch.ones(3, 96).bfloat16()
    sparsify(layer, random_masks(layer, density=0.08))
    calls, product = [], sparse_products.spmm_t
    monkeypatch.setattr(sparse_products, "spmm_t", lambda *a: calls.append(None) or product(*a))
    for agreed in (None, "matrix", "float32"):
        for stored in layer._stored.values():
            stored.form.backend = Backend("auto", agreed)
        F.linear(inputs, layer.weight)
        F.linear(inputs, layer.weight.float().bfloat16())
    ran = {None: processor != "matrix", "matrix": False, "float32": True}
    assert len(calls) == 2 * sum(ran.values())


IN_A_FORK = """
import os, torch
from lightning_axosparse.sparse.ops import products as sparse_products
from lightning_axosparse.sparse.store.formats import layout_of

torch.set_num_threads(2)
layout = layout_of(torch.rand(256, 256) < 0.8)
values, inputs = torch.randn(layout.nnz), torch.randn(64, 256)
expected = sparse_products.spmm_t(inputs, values, layout)
child = os.fork()
if child == 0:
    same = sparse_products.spmm_t(inputs, values, layout).equal(expected)
    os._exit(0 if same else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own(tmp_path):
    (tmp_path / "forks.py").write_text(IN_A_FORK)
    command = [*warm_python(), "forks.py"]
    done = subprocess.run(command, cwd=tmp_path, timeout=PATIENCE, check=False)
    assert done.returncode == 0
