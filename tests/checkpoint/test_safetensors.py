from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from lightning_axosparse import densify, save_safetensors
from lightning_axosparse.checkpoint.safetensors import SafetensorsState
from lightning_axosparse.sparse.store.weight import SparseWeight
from tests.sparse.masking import random_masks, sparse_and_dense


class Net(nn.Module):
    """Tied, with buffers and parameters of several dtypes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.norm = nn.BatchNorm1d(16)
        self.inner = nn.Linear(16, 16).bfloat16()
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.fixture
def models():
    torch.manual_seed(0)
    net = Net()
    return sparse_and_dense(net, random_masks(net))


def test_a_dense_file_is_for_any_reader(models, tmp_path):
    sparse, dense = models
    save_safetensors(sparse, tmp_path / "dense.safetensors", sparse=False)
    loaded = Net()
    assert load_model(loaded, tmp_path / "dense.safetensors") == (set(), [])
    assert_same(loaded.state_dict(), dense.state_dict())
    assert loaded.head.weight is loaded.embedding.weight


@pytest.mark.parametrize("sparse", [False, True])
def test_the_state_reads_as_a_state_dict(models, tmp_path, sparse):
    model, dense = models
    save_safetensors(model, tmp_path / "any.safetensors", sparse=sparse)
    state = SafetensorsState(tmp_path / "any.safetensors")
    assert set(state) == set(dense.state_dict())
    assert len(state) == len(dense.state_dict())
    assert isinstance(state["head.weight"], SparseWeight) == sparse
    assert state.sparse == (["embedding.weight", "inner.weight"] if sparse else [])
    loaded = Net()
    loaded.load_state_dict(state)
    assert_same(loaded.state_dict(), dense.state_dict())


def test_files_of_others_are_read(models, tmp_path):
    from safetensors.torch import save_model

    _, dense = models
    save_model(dense, tmp_path / "theirs.safetensors", metadata={"note": "of no meaning here"})
    loaded = Net()
    loaded.load_state_dict(SafetensorsState(tmp_path / "theirs.safetensors"))
    assert_same(loaded.state_dict(), dense.state_dict())


def test_a_dense_model_is_written_dense(tmp_path):
    net = Net()
    save_safetensors(net, tmp_path / "net.safetensors")
    expected = {k: v for k, v in net.state_dict().items() if k != "head.weight"}
    assert_same(load_file(tmp_path / "net.safetensors"), expected)


def test_writing_changes_nothing(models, tmp_path):
    sparse, dense = models
    for kind in (True, False):
        save_safetensors(sparse, tmp_path / "x.safetensors", sparse=kind)
    densify(sparse)
    assert_same(sparse.state_dict(), dense.state_dict())


def test_state_that_the_format_cannot_hold_raises(tmp_path):
    net = Net()
    net.register_buffer("phase", torch.zeros(3, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"'phase'.*complex128"):
        save_safetensors(net, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()


def assert_same(one, other):
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)
