from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_axosparse.support import attention
from lightning_axosparse.support import threads as threads_module
from lightning_axosparse.support.dense_products import without_mkl


def heads(tokens, size=64, batch=2, number=3, seed=0):
    """Return random heads whose tokens are further apart than their size, as a layer's are."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(batch, tokens, 2, number, size, generator=generator, dtype=torch.float64)
    return sample[:, :, 1].transpose(1, 2)


def attended(operands, gradient, dtype, **options):
    """Return the outputs and the gradients of the operands."""
    operands = [operand.to(dtype).detach().requires_grad_() for operand in operands]
    output = F.scaled_dot_product_attention(*operands, **options)
    output.backward(gradient.to(dtype))
    return [output.detach(), *(operand.grad for operand in operands)]


@pytest.fixture
def calls(monkeypatch):
    """The loops that ran."""
    ran, run = [], attention._run
    monkeypatch.setattr(attention, "_run", lambda name, *a: ran.append(name) or run(name, *a))
    return ran


@settings(max_examples=40, deadline=None)
@given(
    queries=st.sampled_from([1, 5, 47, 48, 49, 64, 65, 130, 200]),
    keys=st.sampled_from([1, 2, 63, 64, 65, 130, 200]),
    size=st.sampled_from([16, 32, 64, 80, 112, 128]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.2]),
    seed=st.integers(0, 2**31),
)
def test_outputs_and_gradients_are_those_of_double_precision(
    queries, keys, size, is_causal, scale, seed
):
    operands = [
        heads(tokens, size, seed=seed + i) for i, tokens in enumerate((queries, keys, keys))
    ]
    gradient = heads(queries, size, seed=seed + 3)
    options = {"is_causal": is_causal, "scale": scale}
    expected = attended(operands, gradient, torch.float64, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MIN_MULTIPLICATIONS", 0)
        with without_mkl():
            found = attended(operands, gradient, torch.float32, **options)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=5e-5, atol=5e-5)


def test_torchs_kernels_return_after_the_context(calls):
    operands, gradient = [heads(200)] * 3, heads(200)
    with without_mkl():
        attended(operands, gradient, torch.float32)
    assert calls == ["attend", "attend_backward"]
    attended(operands, gradient, torch.float32)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("size", "tokens", "dtype", "options"),
    [
        (64, 200, torch.float64, {}),
        (64, 200, torch.bfloat16, {}),
        (64, 60, torch.float32, {}),
        (72, 200, torch.float32, {}),
        (64, 200, torch.float32, {"attn_mask": torch.zeros(200, 200)}),
        (64, 200, torch.float32, {"scale": -1.0}),
    ],
)
def test_torchs_kernel_runs_what_the_loops_do_not(size, tokens, dtype, options, calls):
    operands, gradient = [heads(tokens, size)] * 3, heads(tokens, size)
    expected = attended(operands, gradient, dtype, **options)
    with without_mkl():
        found = attended(operands, gradient, dtype, **options)
    assert not calls
    assert all(map(torch.equal, found, expected))


def test_an_empty_batch(calls):
    empty = heads(200)[:0].float()
    with without_mkl():
        assert F.scaled_dot_product_attention(empty, empty, empty).shape == empty.shape
    assert not calls


def test_shared_heads_and_gradients_without_strides():
    """Keys that several heads share are expanded, as is the gradient of a sum."""
    query, key = heads(200), heads(200)[:, :1].expand(-1, 3, -1, -1)
    gradient = torch.ones((), dtype=torch.float64).expand(query.shape)
    expected = attended([query, key, key], gradient, torch.float64)
    operands = [each.float().detach() for each in (query, heads(200)[:, :1])]
    with without_mkl():
        query, key = (each.requires_grad_() for each in operands)
        shared = key.expand(-1, 3, -1, -1)
        F.scaled_dot_product_attention(query, shared, shared).sum().backward()
    torch.testing.assert_close(query.grad.double(), expected[1], rtol=1e-4, atol=1e-5)
    both = (expected[2] + expected[3]).sum(1, keepdim=True)
    torch.testing.assert_close(key.grad.double(), both, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_heads_that_share_keys_and_values(number, is_causal, threads, calls, monkeypatch):
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    threads(number)
    query, key, value = heads(150, number=6), heads(130, number=2), heads(130, number=2, seed=1)
    gradient, options = heads(150, number=6, seed=2), {"is_causal": is_causal, "enable_gqa": True}
    expected = attended((query, key, value), gradient, torch.float64, **options)
    with without_mkl():
        found = attended((query, key, value), gradient, torch.float32, **options)
    assert calls == ["attend", "attend_backward"]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=5e-5, atol=5e-5)


def test_a_heads_bits_depend_on_no_other_head_and_no_thread(threads, monkeypatch):
    monkeypatch.setattr(threads_module, "WORK_OF_A_THREAD", 1)
    operands, gradient = [heads(150, seed=i) for i in range(3)], heads(150, seed=3)
    results = []
    for number in (1, 2, 4):
        threads(number)
        with without_mkl():
            results.append(attended(operands, gradient, torch.float32, is_causal=True))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    with without_mkl():
        alone = [operand[:1, 1:2] for operand in operands]
        alone = attended(alone, gradient[:1, 1:2], torch.float32, is_causal=True)
    assert all(
        torch.equal(ours, whole[:1, 1:2]) for ours, whole in zip(alone, results[0], strict=True)
    )


def test_numbers_that_are_not_numbers_stay():
    operands = [heads(200) for _ in range(3)]
    operands[1] = operands[1].clone()
    operands[1][0, 0, 3] = float("nan")
    with without_mkl():
        output, *_ = attended(operands, heads(200), torch.float32)
    assert output[0, 0].isnan().all()
    assert not output[0, 1].isnan().any()


LAYOUTS = {
    "head by head": lambda heads: heads.contiguous(),
    "token by token": lambda heads: heads.transpose(1, 2).contiguous().transpose(1, 2),
    "with keys and values": lambda heads: heads,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_have_the_strides_of_torchs_kernels(layout):
    """Code that torch compiles relies on them."""
    operands = [LAYOUTS[layout](heads(130, seed=i).float()) for i in range(3)]
    gradient = heads(130, seed=3).float()

    def strides():
        output, sums = forward(*operands, 0.0, True)
        gradients = backward(gradient, *operands, output, sums, 0.0, True)
        return [tensor.stride() for tensor in (output, sums, *gradients)]

    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    expected = strides()
    with without_mkl():
        assert strides() == expected
