from __future__ import annotations

import torch
from torch import nn, optim

from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.state_size import state_bytes


def trained():
    model = nn.Linear(10, 20)
    optimizer = optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_bytes_before_and_after_the_swap():
    model, optimizer = trained()
    dense = state_bytes(model, optimizer)
    assert (dense.weights, dense.indices, dense.gradients) == (880, 0, 880)
    assert dense.optimizer == 2 * 880 + 2 * 4  # two moments, and a step count a parameter
    mask = torch.zeros(20, 10, dtype=torch.bool)
    mask[:2] = True
    sparsify(model, {"weight": mask}, optimizer, "bitmap")
    sparse = state_bytes(model, optimizer)  # a bit an entry and 2 block starts are indices
    assert (sparse.weights, sparse.indices, sparse.gradients) == (160, 33, 160)
    assert sparse.optimizer == 2 * 160 + 2 * 4
    assert sparse.total == 160 + 33 + 160 + 328


def test_shared_storage_counts_once_and_the_meta_device_not_at_all():
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert state_bytes(tied).total == 64
    tied[0].weight.grad = torch.ones(8, 4)[:4]  # part of a larger buffer
    assert state_bytes(tied).gradients == 128
    tied.append(nn.Linear(100, 100, device="meta"))
    assert state_bytes(tied).weights == 64
    sparsify(tied, {"0.weight": torch.eye(4, dtype=torch.bool)}, index_format="bitmap")
    assert state_bytes(tied).indices == 2 + 8


def test_a_sparse_gradient_counts_its_rows():
    embedding = nn.Embedding(100, 8, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    assert state_bytes(embedding).gradients == 2 * 8 * 4 + 2 * 8
