from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.sparse.layout import CooLayout, index_dtype

shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@given(shapes, dtypes, st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(0, 2**31))
def test_densify_and_compress_agree_with_the_mask(shape, dtype, ratio, seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(shape, generator=generator).to(dtype)
    mask = torch.rand(shape, generator=generator) < ratio
    layout = CooLayout.from_mask(mask)
    values = layout.compress(dense)
    assert layout.nnz == mask.sum()
    assert torch.equal(layout.mask(), mask)
    assert torch.equal(values, dense[mask])
    assert torch.equal(layout.densify(values), dense.where(mask, torch.zeros((), dtype=dtype)))
    assert torch.equal(layout.compress(layout.densify(values)), values)


def test_compress_reads_a_transposed_tensor_in_its_own_order():
    dense = torch.arange(6.0).view(2, 3).t()
    layout = CooLayout.from_mask(dense > 2)
    assert layout.compress(dense).tolist() == [3, 4, 5]


def test_indices_are_int32_below_two_to_the_31_entries():
    assert CooLayout.from_mask(torch.ones(2, 2, dtype=torch.bool)).indices.dtype == torch.int32
    assert index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64


def test_compress_refuses_another_shape():
    layout = CooLayout.from_mask(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        layout.compress(torch.zeros(3, 2))


def test_same_entries():
    one = CooLayout.from_mask(torch.tensor([[True, False]]))
    assert one.same_entries(CooLayout.from_mask(torch.tensor([[True, False]])))
    assert not one.same_entries(CooLayout.from_mask(torch.tensor([[False, True]])))
    assert not one.same_entries(CooLayout.from_mask(torch.tensor([[True], [False]])))


def test_moving_is_seen_by_all_who_share_the_layout_and_to_is_not():
    layout = CooLayout.from_mask(torch.tensor([[True, False]]))
    assert layout.to(torch.device("cpu")) is layout
    assert layout.to(torch.device("meta")).indices.is_meta
    assert not layout.indices.is_meta
    layout.move(torch.device("meta"))
    assert layout.indices.is_meta
