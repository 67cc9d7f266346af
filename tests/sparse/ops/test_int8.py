from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.sparse.kernels import int8 as loops
from lightning_axosparse.sparse.kernels import one_token
from lightning_axosparse.sparse.ops import int8
from lightning_axosparse.sparse.ops.int8 import MOST_TOKENS, Int8Weight
from lightning_axosparse.sparse.store.formats import layout_of
from lightning_axosparse.support import threads as threads_module

in_integers = pytest.mark.skipif(not loops.HAS_BYTES, reason="needs AVX-512 with VBMI and VNNI")


def weight(height, width, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(height, width, generator=generator) < density
    mask[1::5] = False  # rows of which all entries are pruned
    dense = torch.randn(height, width, generator=generator) * torch.rand(height, 1).exp()
    layout = layout_of(mask, "segments")
    return dense * mask, Int8Weight.nearest(layout.compress(dense), layout)


def expected(inputs, weight, bias=None):
    """Return the outputs, computed in int64 from integers that Python rounds."""
    largest = inputs.abs().amax(-1, keepdim=True)
    factors = torch.where(largest > 1e-36, 127 / largest, 0)
    rounded = torch.floor(inputs * factors + 128.5).long() - 128
    sums = rounded @ weight.layout.densify(weight.values.long()).t()
    outputs = sums.float() * (largest / 127 * weight.scales)
    return outputs if bias is None else outputs + bias


@settings(max_examples=60, deadline=None)
@given(
    height=st.sampled_from([1, 3, 16, 65, 130]),
    width=st.sampled_from([64, 65, 79, 255, 256, 257, 600]),
    tokens=st.integers(1, MOST_TOKENS + 3),
    density=st.sampled_from([0.0, 0.02, 0.1, 0.3, 1.0]),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_outputs_are_those_of_integers_to_the_bit(height, width, tokens, density, biased, seed):
    _, rounded = weight(height, width, density, seed)
    inputs, bias = torch.randn(tokens, width), torch.randn(height) if biased else None
    inputs[0] = 0
    outputs = int8.multiply(inputs, rounded, bias)
    assert torch.equal(outputs, expected(inputs, rounded, bias))
    assert torch.equal(outputs, int8.multiply_densely(inputs, rounded, bias))


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_values_are_the_nearest_of_255_per_row(density):
    dense, rounded = weight(40, 300, density)
    assert (rounded.dense() - dense).abs().le(rounded.scales[:, None] / 2 * 1.0001).all()
    assert rounded.values.abs().max() == 127
    assert torch.equal(rounded.sums, rounded.layout.densify(rounded.values.int()).sum(1).int())
    assert rounded.scales[1] == 0


@in_integers
def test_few_tokens_are_multiplied_in_integers_and_others_to_the_same_bits(monkeypatch):
    _, rounded = weight(100, 700, 0.2)
    called, inputs = [], torch.randn(MOST_TOKENS + 16, 700)
    monkeypatch.setattr(
        loops, "round_inputs", lambda *args, plain=loops.round_inputs: called.append(plain(*args))
    )
    together = int8.multiply(inputs, rounded)
    assert not called
    parts = [int8.multiply(part, rounded) for part in inputs.split([1, 2, 4, 7, MOST_TOKENS, 2])]
    assert len(called) == len(parts)
    assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize("loop", ["by_segments", "by_columns"])
@pytest.mark.parametrize("width", [64, 257, 700])
def test_one_token_on_other_processors_has_the_same_bits(loop, width, monkeypatch):
    if loop == "by_segments" and not one_token.HAS_AVX512:
        pytest.skip("needs AVX-512")
    monkeypatch.setattr(loops, "HAS_BYTES", False)
    monkeypatch.setattr(one_token, "one_token_spmm_t", getattr(one_token, loop))
    for density in (0.02, 0.3, 1.0):
        _, rounded = weight(100, width, density)
        inputs = torch.randn(1, width)
        assert torch.equal(int8.multiply(inputs, rounded), expected(inputs, rounded))


@pytest.mark.parametrize("tokens", [1, 5])
def test_the_bits_are_the_same_with_any_number_of_threads(tokens, threads, monkeypatch):
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    _, rounded = weight(200, 700, 0.2)
    inputs, results = torch.randn(tokens, 700), []
    for number in (1, 2, 3):
        threads(number)
        results.append(int8.multiply(inputs, rounded))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS + 1])
def test_what_is_not_finite_stays_so(tokens, value):
    _, rounded = weight(10, 64, 1.0)
    inputs = torch.randn(tokens, 64)
    inputs[0, 20] = value
    outputs = int8.multiply(inputs, rounded)
    assert not outputs[0, 0].isfinite()
    assert outputs[1:].isfinite().all()


@pytest.mark.parametrize("size", [1e-44, 1e-37, 1e-35, 1e30])
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS + 1])
def test_inputs_of_any_size(size, tokens):
    _, rounded = weight(30, 100, 0.3)
    inputs = torch.rand(tokens, 100) * size
    outputs = int8.multiply(inputs, rounded)
    assert outputs.isfinite().all()
    assert torch.equal(outputs, expected(inputs, rounded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (4, 5), (0,)])
def test_other_dtypes_and_shapes(dtype, shape):
    _, rounded = weight(30, 100, 0.3)
    inputs, bias = torch.randn(*shape, 100).to(dtype), torch.randn(30).to(dtype)
    outputs = int8.multiply(inputs, rounded, bias)
    assert outputs.dtype == dtype
    assert torch.equal(outputs, expected(inputs.float(), rounded, bias.float()).to(dtype))


def test_inputs_of_any_strides():
    _, rounded = weight(30, 100, 0.3)
    inputs = torch.randn(100, 6).t()
    assert torch.equal(int8.multiply(inputs, rounded), expected(inputs, rounded))


def test_copies_have_own_values():
    _, rounded = weight(30, 100, 0.3)
    inputs = torch.randn(1, 100)
    before = int8.multiply(inputs, rounded)
    copied = copy.deepcopy(rounded)
    copied.values.zero_()
    copied.sums.zero_()
    assert not int8.multiply(inputs, copied).any()
    assert torch.equal(int8.multiply(inputs, rounded), before)
