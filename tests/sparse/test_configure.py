from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from lightning_axosparse import sparsify
from lightning_axosparse.sparse.configure import dense_shapes
from tests.sparse.masking import random_masks


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])
def test_optimizers_see_matrices_and_step_vectors(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    masks = random_masks(model)
    sparsify(model, masks)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with dense_shapes(model) as made:
        assert {n: p.shape for n, p in model.named_parameters() if p.dim() > 1} == {
            name: mask.shape for name, mask in masks.items()
        }
        made.append(kind(model.parameters(), 0.1))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])
    model(torch.randn(2, 6)).sum().backward()
    made[0].step()
    for parameter in model.parameters():
        for state in made[0].state[parameter].values():
            assert state.dim() == 0 or state.shape == parameter.shape


def test_values_come_back_when_configuring_fails():
    model = nn.Linear(6, 8)
    sparsify(model, random_masks(model))
    shape = dict(model.named_parameters())["weight"].shape
    with pytest.raises(ZeroDivisionError), dense_shapes(model):
        raise ZeroDivisionError
    assert dict(model.named_parameters())["weight"].shape == shape
