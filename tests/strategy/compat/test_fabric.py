"""Fabric refuses the strategy, and trains what is stored sparse."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_axosparse import AxoSparseStrategy, sparsify


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("axosparse", "invalid strategy name: `strategy='axosparse'`"),
        (AxoSparseStrategy(g_inter=2), "which is for a Trainer: Fabric has none"),
    ],
)
def test_fabric_refuses_the_strategy(strategy, words):
    with pytest.raises(ValueError, match=words):
        L.Fabric(accelerator="cpu", devices=1, strategy=strategy)


def test_sparse_storage_trains_under_fabric_like_masked_dense_weights():
    torch.manual_seed(0)
    data = torch.randn(3, 8, 4)
    mask = torch.rand(4, 4) > 0.5

    def trained(sparse: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            model.weight *= mask
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if sparse:
            sparsify(model, {"weight": mask}, optimizer)
        fabric = L.Fabric(accelerator="cpu", devices=1)
        wrapped, stepped = fabric.setup(model, optimizer)
        for batch in data:
            stepped.zero_grad()
            fabric.backward(wrapped(batch).square().sum())
            if not sparse:
                model.weight.grad *= mask
            stepped.step()
        return model.weight.detach() * 1.0

    assert torch.allclose(trained(True), trained(False), rtol=0, atol=1e-6)
