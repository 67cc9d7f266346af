from __future__ import annotations

import pytest
import torch

from lightning_axosparse.sparse.module import sparse_module


@pytest.fixture
def reads(monkeypatch):
    """The weights that were read as dense-shaped tensors."""
    reads = []
    read = sparse_module.read_weight
    monkeypatch.setattr(
        sparse_module, "read_weight", lambda *args: reads.append(args) or read(*args)
    )
    return reads


@pytest.fixture
def threads():
    """Sets the number of torch's threads."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
