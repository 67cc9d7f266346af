"""Mixtures of experts train sparse as dense and masked, however their experts are stored."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from lightning_axosparse import densify, sparsify
from tests.sparse.masking import sparse_and_dense

EXPERTS, WIDTH = 5, 64
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def mixtral(implementation, dtype=torch.float64):
    """A block whose router never chooses the last expert."""
    config = MixtralConfig(
        hidden_size=WIDTH,
        intermediate_size=96,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        experts_implementation=implementation,
    )
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config).to(dtype)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    with torch.no_grad():
        block.gate.weight[-1] = 0
        block.gate.weight[:, 0] = 0
        block.gate.weight[:-1, 0] = 5
    return block


def batch(step, dtype=torch.float64):
    inputs = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    inputs[..., 0] = 3  # by which the router tells the last expert from the others
    return inputs


def masks_of(block):
    torch.manual_seed(1)
    shapes = {name: p.shape for name, p in block.named_parameters() if name != "gate.weight"}
    return {name: torch.rand(shape) < 0.3 for name, shape in shapes.items()}


def trained(block, optimizer, masks, steps=4):
    """Train, with the gradients and the momenta of pruned entries zero, and return the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = block(batch(step)).square().mean()
        loss.backward()
        for name, parameter in block.named_parameters():
            if name in masks and parameter.shape == masks[name].shape:
                assert parameter.grad is not None
                parameter.grad.mul_(masks[name])
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_a_block_of_mixtral(implementation, optimizer):
    masks = masks_of(mixtral("eager"))
    sparse, _ = sparse_and_dense(mixtral(implementation), masks)
    # torch's own grouped_mm takes no float64.
    dense = sparse_and_dense(mixtral("eager"), masks)[1]
    found = trained(sparse, OPTIMIZERS[optimizer](sparse.parameters()), masks)
    expected = trained(dense, OPTIMIZERS[optimizer](dense.parameters()), masks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for name in ("gate_up_proj", "down_proj"):
        gradient = sparse.experts._parameters[name].grad
        edges = getattr(sparse.experts, name).sparse_layout.edges
        assert gradient[: edges[-2]].abs().sum() > 0
        assert torch.equal(gradient[edges[-2] :], torch.zeros(edges[-1] - edges[-2]).double())
    densify(sparse)
    for (name, one), other in zip(sparse.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(one, other * masks.get(name, 1), rtol=1e-12, atol=1e-12)


class Experts(nn.Module):
    """Experts as layers, with a fixed router."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(EXPERTS))

    def forward(self, inputs):
        tokens, outputs = inputs.flatten(0, 1), torch.zeros_like(inputs.flatten(0, 1))
        for number in range(EXPERTS - 1):
            chosen = torch.arange(len(tokens)) % (EXPERTS - 1) == number
            outputs[chosen] = self.experts[number](tokens[chosen])
        return outputs


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lora_on_experts_as_layers(optimizer):
    """PEFT trains what it adds; the pruned weights are frozen."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=r".*experts\.\d", init_lora_weights=False)
    tuned = get_peft_model(Experts(), config)
    masks = {
        n: torch.rand(p.shape) < 0.3
        for n, p in tuned.named_parameters()
        if "base_layer.weight" in n
    }
    assert len(masks) == EXPERTS
    sparse, dense = sparse_and_dense(tuned, masks)
    losses = [
        trained(model, OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad), {})
        for model in (sparse, dense)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_lora_on_experts_in_one_parameter(optimizer):
    """PEFT adds to the whole parameter in each call, which then is stored sparse again."""
    targets = ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
    tuned = get_peft_model(mixtral("eager"), config)
    frozen = [name for name, p in tuned.named_parameters() if not p.requires_grad]
    masks = {name: torch.rand(tuned.get_parameter(name).shape) < 0.3 for name in frozen}
    assert len(masks) == len(targets)
    sparse, dense = sparse_and_dense(tuned, masks)
    before = {name: p.detach().clone() for name, p in sparse.named_parameters()}
    losses = [
        trained(model, OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad), {})
        for model in (sparse, dense)
    ]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    after = dict(sparse.named_parameters())
    assert after.keys() == before.keys()
    assert {n for n, p in after.items() if torch.equal(p, before[n])} == set(frozen)
    assert sparse.state_dict().keys() == dense.state_dict().keys()


def test_weights_that_are_trained_are_not_replaced():
    tuned = get_peft_model(mixtral("eager"), LoraConfig(target_parameters=["experts.down_proj"]))
    block = tuned.base_model.model.experts.base_layer.requires_grad_(True)
    sparsify(block, {"down_proj": torch.rand(block.down_proj.shape) < 0.3})
    with pytest.raises(MisconfigurationException, match="'down_proj' cannot be replaced"):
        tuned(batch(0))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def test_a_frozen_stack_stays_sparse_in_a_parametrization():
    block, masks = mixtral("eager").requires_grad_(False), masks_of(mixtral("eager"))
    sparse, dense = sparse_and_dense(block, masks)
    for model in (sparse, dense):
        parametrize.register_parametrization(model.experts, "down_proj", Doubled())
        model.float().double()
    found, expected = sparse.state_dict(), dense.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    original = sparse.experts.parametrizations.down_proj.original
    assert original.stored_values.numel() == masks["experts.down_proj"].sum()
    file = io.BytesIO()
    torch.save(found, file)
    with torch.no_grad():
        original.zero_()
    sparse.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    inputs = batch(0)
    torch.testing.assert_close(sparse(inputs), dense(inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(MisconfigurationException, match="remove_parametrizations first"):
        densify(sparse)
    for model in (sparse, dense):
        parametrize.remove_parametrizations(model.experts, "down_proj", leave_parametrized=False)
    torch.testing.assert_close(sparse(inputs), dense(inputs), rtol=1e-12, atol=1e-12)
    densify(sparse)
    assert type(sparse.experts) is type(dense.experts)


def test_a_second_pruning_keeps_fewer():
    block, masks = mixtral("eager"), masks_of(mixtral("eager"))
    optimizer = OPTIMIZERS["AdamW"](block.parameters())
    sparsify(block, masks, optimizer)
    trained(block, optimizer, {})
    fewer = {name: mask & (torch.rand(mask.shape) < 0.5) for name, mask in masks.items()}
    expected = copy.deepcopy(block)
    densify(expected)
    sparsify(block, fewer, optimizer)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.mul_(fewer.get(name, 1))
    torch.testing.assert_close(block(batch(9)), expected(batch(9)), rtol=1e-12, atol=1e-12)
    trained(block, optimizer, {})
