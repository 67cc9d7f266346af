from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import nn

from lightning_axosparse import densify, save_safetensors
from lightning_axosparse.checkpoint.safetensors import (
    SafetensorsState,
    decode,
    decode_mask,
    encode,
    is_safetensors,
)
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


def test_a_file_is_known_by_its_content(models, tmp_path):
    sparse, _ = models
    for name in ("a.safetensors", "a.st", "a"):
        save_safetensors(sparse, tmp_path / name)
        assert is_safetensors(tmp_path / name)
    torch.save(sparse.state_dict(), tmp_path / "b.pt")
    assert not is_safetensors(tmp_path / "b.pt")
    assert not is_safetensors(tmp_path / "none.pt")


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


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
ENTRIES = 400_000


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    dtypes,
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.integers(0, 2**31),
)
def test_decoding_returns_what_was_encoded(shape, dtype, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < ratio
    values = torch.randn(int(mask.sum()), generator=generator).to(dtype)
    index, code = encode(values, mask)
    assert torch.equal(decode_mask(index, mask.shape), mask)
    lazy = decode(code, mask, dtype)
    assert (lazy.shape, lazy.dtype) == (mask.shape, dtype)
    assert torch.equal(lazy.stored_values, values)
    assert torch.equal(lazy.dense()[mask], values)


@given(st.lists(st.sampled_from([1, 2, 254, 255, 256, 257, 510, 511, 5000]), max_size=9))
def test_far_apart_entries(distances):
    places = torch.tensor(distances, dtype=torch.int64).cumsum(0)
    mask = torch.zeros(int(sum(distances)) + 700, dtype=torch.bool)
    mask[places] = True
    index, _ = encode(torch.ones(len(distances)), mask)
    assert torch.equal(decode_mask(index, mask.shape), mask)


def magnitudes(ratio):
    """A matrix with rows and columns of unequal scale, as training leaves them, and its mask."""
    torch.manual_seed(0)
    rows, columns = torch.randn(500, 1).mul(0.5).exp(), torch.randn(800).mul(0.5).exp()
    weight = torch.randn(500, 800) * rows * columns
    return weight, weight.abs() > weight.abs().flatten().kthvalue(int(ratio * ENTRIES)).values


@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.9, 0.95, 0.99])
def test_places_take_little_more_than_their_entropy(ratio):
    torch.manual_seed(0)
    mask = torch.rand(ENTRIES) >= ratio
    nnz = int(mask.sum())
    share = nnz / ENTRIES
    bits = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * ENTRIES
    assert 8 * encode(torch.ones(nnz), mask)[0].numel() < 1.02 * bits


# At 0.99 in float16 the places (0.9 bytes) and the mantissas (10 bits) alone come to 1.1.
@pytest.mark.parametrize(
    ("ratio", "dtype"),
    [(ratio, torch.float32) for ratio in (0.5, 0.8, 0.9, 0.95, 0.99)]
    + [(ratio, torch.bfloat16) for ratio in (0.5, 0.8, 0.9, 0.95, 0.99)]
    + [(ratio, torch.float16) for ratio in (0.5, 0.8, 0.9, 0.95)],
)
def test_a_pruned_weight_takes_less_than_1_15_of_its_kept_values(ratio, dtype):
    weight, mask = magnitudes(ratio)
    values = weight[mask].to(dtype)
    index, code = encode(values, mask)
    assert index.numel() + code.numel() < 1.15 * values.numel() * dtype.itemsize
