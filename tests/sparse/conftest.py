from __future__ import annotations

import pytest

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
