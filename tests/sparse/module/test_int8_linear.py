"""Models predict with weights of eight bits as with those of 32, up to rounding."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_axosparse import Ticket, load_sparse, save_safetensors, sparsify
from lightning_axosparse.sparse.module.int8_linear import Int8Linear

TOKENS = torch.arange(12).view(2, 6)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 70), nn.Linear(70, 5))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=96)).eval()


def llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {"mlp": (mlp, 3), "gpt2": (gpt2, 9), "llama": (llama, 15)}
"""Each with its linear layers, tied heads included."""


def outputs(model: nn.Module) -> torch.Tensor:
    if isinstance(model, nn.Sequential):
        result: torch.Tensor = model(torch.linspace(-1, 1, 640).sin().view(10, 64))
    else:
        result = model(TOKENS).logits
    return result


@pytest.fixture(params=MODELS)
def case(request, tmp_path):
    """A pruned model, and the same in eight bits."""
    build, layers = MODELS[request.param]
    torch.manual_seed(0)
    pruned = build()
    sparsify(pruned, Ticket.magnitude(pruned, 0.7).masks)
    save_safetensors(pruned, tmp_path / "pruned.safetensors")
    with torch.device("cpu" if build is llama else "meta"):  # its angles are computed
        rounded = build()
    load_sparse(rounded, tmp_path / "pruned.safetensors", dtype=torch.int8)
    assert sum(isinstance(layer, Int8Linear) for layer in rounded.modules()) == layers
    return pruned, rounded


def test_a_model_predicts_up_to_rounding(case):
    pruned, rounded = case
    wanted, found = outputs(pruned), outputs(rounded)
    error = (found - wanted).std() / wanted.std()
    assert 0 < error < 0.02
    assert not any(parameter.requires_grad for parameter in rounded.parameters())


def test_copies_pickles_casts_and_compiled_models(case):
    _, rounded = case
    found = outputs(rounded)
    assert torch.equal(outputs(copy.deepcopy(rounded)), found)
    assert torch.equal(outputs(pickle.loads(pickle.dumps(rounded))), found)
    cast = copy.deepcopy(rounded).bfloat16()
    layer = next(layer for layer in cast.modules() if isinstance(layer, Int8Linear))
    assert (layer.stored.values.dtype, layer.stored.scales.dtype) == (torch.int8, torch.float32)
    error = (outputs(cast).float() - found).std() / found.std()
    assert error < 0.05
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert outputs(rounded).dtype == torch.bfloat16


def test_a_compiled_model_is_traced_as_a_whole(case):
    _, rounded = case
    if isinstance(rounded, nn.Sequential):
        inputs = torch.randn(3, 64)
        found = torch.compile(rounded, backend="aot_eager", fullgraph=True)(inputs)
        torch.testing.assert_close(found, rounded(inputs))


def test_generation_caches_keys_and_values(case):
    _, rounded = case
    if not hasattr(rounded, "generate"):
        pytest.skip("generates no text")
    prompts = torch.arange(10, 16).view(2, 3)
    together = rounded.generate(prompts, max_new_tokens=8, do_sample=False)
    uncached = rounded.generate(prompts, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(together, uncached)


def test_layers_too_narrow_for_the_loops_stay_as_they_are(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    sparsify(model, Ticket.magnitude(model, 0.5).masks)
    save_safetensors(model, tmp_path / "pruned.safetensors")
    load_sparse(model, tmp_path / "pruned.safetensors", dtype=torch.int8)
    assert [isinstance(layer, Int8Linear) for layer in model] == [True, False]


def test_a_layer_shows_its_weight_dense(case):
    _, rounded = case
    layer = next(layer for layer in rounded.modules() if isinstance(layer, Int8Linear))
    weight = layer.weight
    assert f"nnz={weight.count_nonzero()}" in repr(layer)
    inputs = torch.eye(weight.shape[1])
    outputs = layer(inputs) - (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(outputs.t(), weight)


def test_a_model_moves_to_another_device(case):
    _, rounded = case
    layer = next(layer for layer in rounded.modules() if isinstance(layer, Int8Linear))
    layer.to("meta")
    assert layer.stored.values.is_meta
    assert layer(torch.empty(3, layer.stored.layout.shape[1], device="meta")).is_meta


def test_what_such_a_model_cannot_do_says_so(case, tmp_path):
    _, rounded = case
    with pytest.raises(RuntimeError, match=r"neither saved nor replaced\. Keep"):
        rounded.state_dict()
    with pytest.raises(RuntimeError, match="neither saved nor replaced"):
        save_safetensors(rounded, tmp_path / "again.safetensors")
    with pytest.raises(RuntimeError, match="neither saved nor replaced"):
        load_sparse(rounded, tmp_path / "pruned.safetensors")
    layer = next(layer for layer in rounded.modules() if isinstance(layer, Int8Linear))
    inputs = torch.randn(2, layer.stored.layout.shape[1], requires_grad=True)
    with pytest.raises(RuntimeError, match="computes no gradients"):
        layer(inputs)
    with torch.no_grad():
        layer(inputs)
    for wrong in (torch.randn(2, 63), inputs.detach().long()):
        with pytest.raises(RuntimeError, match=r"m1 and m2|mat1 and mat2"):
            layer(wrong)
