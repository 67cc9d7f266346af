from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.perplexity.masked_weights import MaskedWeights


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.NAdam(p, 0.1),
        lambda p: torch.optim.Adadelta(p, 0.1),
    ],
)
def test_masked_entries_stay_zero_with_their_state_and_the_others_train_as_before(make):
    torch.manual_seed(0)
    model, bare = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    bare.load_state_dict(model.state_dict())
    optimizers = [make(model.parameters()), make(bare.parameters())]
    mask = torch.rand(4, 6) < 0.5
    held = None
    for step in range(6):
        gradients = {n: torch.randn_like(p) for n, p in model.named_parameters()}
        if step == 2:
            weights = dict(model.named_parameters())
            held = MaskedWeights(weights, {"weight": mask}, optimizers[:1])
        for module in (model, bare):
            for name, parameter in module.named_parameters():
                parameter.grad = gradients[name].clone()
        if held is not None:
            held.mask_gradients()
        for optimizer in optimizers:
            optimizer.step()
    assert not model.weight[~mask].any()
    assert torch.equal(model.weight[mask], bare.weight[mask])
    assert torch.equal(model.bias, bare.bias)
    state = optimizers[0].state[model.weight]
    tensors = [value for value in state.values() if getattr(value, "shape", ()) == mask.shape]
    assert tensors or isinstance(optimizers[0], torch.optim.SGD)
    assert not any(value[~mask].any() for value in tensors)
