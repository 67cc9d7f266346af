"""Weights that stay dense in the dtype of products, and weights of 16 bits with float32 masters."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_axosparse import densify, load_sparse, save_safetensors, sparsify
from lightning_axosparse.sparse.module.parameters import forget, owners, pack, state_bytes, unpack
from lightning_axosparse.sparse.ops import torch_functions
from lightning_axosparse.sparse.store.layout import Layout
from lightning_axosparse.sparse.store.materialize import copy_pays
from tests.sparse.masking import apply_masks, assert_same_gradients, random_masks
from tests.sparse.test_layers import build, layer_types, run

with_and_without_copy = pytest.mark.parametrize("compute", ["auto", "samo"])


@pytest.fixture
def fills(monkeypatch):
    """The dtype of every resident copy that was filled."""
    filled = []
    fill = Layout.fill

    def watched(layout, dense, values):
        filled.append(dense.dtype)
        fill(layout, dense, values)

    monkeypatch.setattr(Layout, "fill", watched)
    return filled


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    return nn.Sequential(*layers).to(dtype)


def resident(compute="samo", dtype=torch.float32):
    model = network(dtype)
    sparsify(model, random_masks(model), compute=compute)
    return model


@layer_types
@pytest.mark.parametrize("replaced", [False, True])
def test_a_resident_copy_changes_no_number(name, replaced, monkeypatch):
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0 if replaced else 2**18)
    module, inputs, masks = build(name)
    dense = copy.deepcopy(module)
    apply_masks(dense, masks)
    sparsify(module, masks, compute="samo")
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (module, dense)]
    for _ in range(2):
        (found, _), (expected, _) = run(module, inputs), run(dense, inputs)
        torch.testing.assert_close(found, expected)
        assert_same_gradients(module, dense, masks)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        apply_masks(dense, masks)


@pytest.mark.parametrize("fused", [False, True])
def test_it_is_filled_once_a_step(fused, fills, monkeypatch):
    monkeypatch.setattr(torch_functions, "MIN_ENTRIES", 0)
    model, inputs = resident(), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    for step in range(1, 4):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(inputs)
            output.float().square().sum().backward()
        assert fills == [torch.bfloat16] * 3 * step
        optimizer.step()
    assert state_bytes(model).resident == 2 * (16 * 32 + 32 * 32 + 32 * 4)
    with torch.no_grad():
        model(inputs)  # not under autocast: the copy is of the weights' own dtype
    assert fills[9:] == [torch.float32] * 3
    assert state_bytes(model).resident == 4 * (16 * 32 + 32 * 32 + 32 * 4)
    sparsify(model, {}, compute="samo")
    densify(model)
    assert state_bytes(model).resident == 0


def test_one_hook_counts_steps_for_all_copies():
    resident()(torch.randn(8, 16))
    before = list(_global_optimizer_post_hooks)
    resident()(torch.randn(8, 16))
    assert list(_global_optimizer_post_hooks) == before


def test_values_that_came_through_data_are_seen_after_evaluation():
    model, inputs = resident(), torch.randn(8, 16)
    expected = model(inputs)
    averaged = [p.detach() * 0.5 for p in model.parameters()]
    own = [p.detach().clone() for p in model.parameters()]
    model.eval()
    for parameter, value in zip(model.parameters(), averaged, strict=True):
        parameter.data.copy_(value)
    assert not torch.allclose(model(inputs), expected)
    for parameter, value in zip(model.parameters(), own, strict=True):
        parameter.data.copy_(value)
    assert torch.equal(model.train()(inputs), expected)


def test_validation_in_inference_mode_may_fill_it_first():
    model, inputs = resident(), torch.randn(8, 16)
    with torch.inference_mode():
        expected = model(inputs)
    found = model(inputs)
    found.sum().backward()
    assert torch.equal(found, expected)


def test_a_functional_call_reads_its_own_values():
    model, inputs = resident(), torch.randn(8, 16)
    expected = model(inputs)
    halves = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    called = torch.func.functional_call(model, halves, (inputs,))
    assert not torch.allclose(called, expected)
    expected.sum().backward()
    assert torch.equal(model(inputs), expected)


def test_what_is_made_of_it_is_ones_own():
    model, inputs = resident(), torch.randn(8, 16)
    expected = model(inputs)
    with torch.no_grad():
        model[0].weight.numpy()[:] = 7
        model[0].weight.view(torch.int32).zero_()
        model[0].weight.clone().zero_()
    assert torch.equal(model(inputs), expected)
    with torch.no_grad():
        model[2].weight.mul_(2)
    assert not torch.equal(model(inputs), expected)


@with_and_without_copy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_change_between_forward_and_backward_is_detected(compute, dtype):
    model = resident(compute, dtype)
    loss = model(torch.randn(8, 16, dtype=dtype)).sum()
    with torch.no_grad():
        model[2]._parameters["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@with_and_without_copy
def test_copies_and_pickles_read_as_the_original(compute):
    model, inputs = resident(compute, torch.bfloat16), torch.randn(8, 16).bfloat16()
    expected = model(inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert state_bytes(other).resident == 0
        assert torch.equal(other(inputs), expected)
        assert state_bytes(other).resident == state_bytes(model).resident


@with_and_without_copy
def test_compiled(compute):
    model, inputs = resident(compute, torch.bfloat16), torch.randn(8, 16).bfloat16()
    expected, gradients = model(inputs), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(inputs)
    torch.testing.assert_close(compiled, expected)
    for output in (expected, compiled):
        gradients.append(torch.autograd.grad(output.square().sum(), list(model.parameters())))
    torch.testing.assert_close(*gradients)


@with_and_without_copy
def test_masters_stay_float32_whatever_the_weights_read_as(compute):
    model = resident(compute)
    values = model[0]._parameters["weight"].detach().clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        assert model[0].weight.dtype == model[0].bias.dtype == dtype
        assert {v.dtype for v in model.state_dict().values()} == {dtype}
        assert torch.equal(model[0]._parameters["weight"], values)
        model(torch.randn(2, 16, dtype=dtype)).sum().backward()
        assert model[0]._parameters["weight"].grad.dtype == torch.float32
    model.double()
    assert model[0]._parameters["weight"].dtype == torch.float64


def masked_reference(precision, masks, steps):
    """Losses with dense weights, float32 masters of the masked ones, and the masks held."""
    read = network(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    masters = {
        name: nn.Parameter(p.detach().clone().float() if name in masks else p.detach().clone())
        for name, p in read.named_parameters()
    }
    optimizer = torch.optim.AdamW(masters.values(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    losses = []
    for step in range(steps):
        with torch.no_grad():
            for name, parameter in read.named_parameters():
                parameter.copy_(masters[name] * masks.get(name, 1))
        for microbatch in range(2):
            read.zero_grad()
            losses.append(backward(read, precision, scaler, 2 * step + microbatch))
            for name, parameter in read.named_parameters():
                master, gradient = masters[name], parameter.grad * masks.get(name, 1)
                gradient = gradient.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


def backward(model, precision, scaler, seed):
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
    inputs = inputs.to(model[0].bias.dtype)
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=precision.endswith("mixed")):
        loss = model(inputs).float().square().mean()
    scaler.scale(loss).backward()
    return loss.item()


@with_and_without_copy
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_every_precision_trains_as_dense_weights_with_float32_masters(precision, compute):
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    model = network(dtype)
    masks = random_masks(model, 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsify(model, masks, optimizer, compute=compute)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "16-mixed")
    losses = []
    for step in range(6):
        losses += [backward(model, precision, scaler, 2 * step + half) for half in range(2)]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    expected = masked_reference(precision, masks, 6)
    assert expected[-1] < 0.8 * expected[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert {p.dtype for n, p in model.named_parameters() if n in masks} == {torch.float32}
    densify(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {dtype}
    backward(model, precision, scaler, 0)
    scaler.step(optimizer)


def test_the_swap_keeps_what_a_bfloat16_optimizer_had():
    model, inputs = network(torch.bfloat16), torch.randn(8, 16).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model(inputs).square().sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state[model[0].weight])
    weight = model[0].weight
    masks = random_masks(model)
    sparsify(model, masks, optimizer)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == weight.dtype == weight.grad.dtype == torch.float32
    assert torch.equal(state["exp_avg"], before["exp_avg"][masks["0.weight"]].float())
    optimizer.step()


def test_where_a_copy_pays():
    assert copy_pays(sixteen_bit=True, passes=8, sparse_products=False)
    assert not copy_pays(sixteen_bit=True, passes=8, sparse_products=True)
    assert not copy_pays(sixteen_bit=True, passes=1, sparse_products=False)
    assert not copy_pays(sixteen_bit=False, passes=8, sparse_products=False)


def test_a_later_choice_takes_the_copy_away_and_brings_it_back():
    model = network()
    masks, inputs = random_masks(model), torch.randn(8, 16)
    for compute in ("samo", "dense", "samo"):
        sparsify(model, masks, compute=compute)
        model(inputs)
        assert (state_bytes(model).resident > 0) == (compute == "samo")


def test_a_packed_parameter_keeps_its_dense_form():
    model, inputs = resident("samo", torch.bfloat16), torch.randn(8, 16).bfloat16()
    expected = model(inputs)
    held = owners(model)
    for name, parameter in list(model.named_parameters()):
        packed = pickle.loads(pickle.dumps(pack(parameter, held[name], [])))
        forget(parameter, held[name], [])
        parameter.data = torch.empty(0, dtype=torch.bfloat16)
        unpack(packed, parameter, held[name], [], torch.device("cpu"))
    assert torch.equal(model(inputs), expected)
    assert model[0]._parameters["weight"].dtype == torch.float32
    assert state_bytes(model).resident == 2 * (16 * 32 + 32 * 32 + 32 * 4)


@with_and_without_copy
def test_files_hold_the_modules_dtype(compute, tmp_path):
    model, inputs = resident(compute, torch.bfloat16), torch.randn(8, 16).bfloat16()
    save_safetensors(model, tmp_path / "model.safetensors")
    loaded = network(torch.bfloat16)
    load_sparse(loaded, tmp_path / "model.safetensors")
    assert torch.equal(loaded(inputs), model(inputs))
    assert loaded[0].weight.dtype == torch.bfloat16
    assert loaded[0]._parameters["weight"].dtype == torch.float32
    model.load_state_dict(loaded.state_dict(keep_vars=True))
    assert torch.equal(loaded(inputs), model(inputs))
