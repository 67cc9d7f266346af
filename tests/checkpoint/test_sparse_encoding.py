from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.checkpoint.sparse_encoding import decoded, decoded_mask, encoded

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
    index, code = encoded(values, mask)
    assert torch.equal(decoded_mask(index, mask.shape), mask)
    lazy = decoded(code, mask, dtype)
    assert (lazy.shape, lazy.dtype) == (mask.shape, dtype)
    assert torch.equal(lazy.kept, values)
    assert torch.equal(lazy.dense()[mask], values)


@given(st.lists(st.sampled_from([1, 2, 254, 255, 256, 257, 510, 511, 5000]), max_size=9))
def test_far_apart_entries(distances):
    places = torch.tensor(distances, dtype=torch.int64).cumsum(0)
    mask = torch.zeros(int(sum(distances)) + 700, dtype=torch.bool)
    mask[places] = True
    index, _ = encoded(torch.ones(len(distances)), mask)
    assert torch.equal(decoded_mask(index, mask.shape), mask)


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
    kept = int(mask.sum())
    share = kept / ENTRIES
    bits = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) * ENTRIES
    assert 8 * encoded(torch.ones(kept), mask)[0].numel() < 1.02 * bits


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
    index, code = encoded(values, mask)
    assert index.numel() + code.numel() < 1.15 * values.numel() * dtype.itemsize
