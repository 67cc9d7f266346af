"""What ``test_bitmap_product.py`` runs in Triton's interpreter, which multiplies no bfloat16."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from benchmarks.gpu.bitmap_product import Cut, spmm_t
from lightning_axosparse.sparse.store.formats import BitmapLayout


@settings(max_examples=8, deadline=None)
@example(shape=(20, 512), tokens=3, kept=0.2, cut=Cut(16, 64, 3), seed=0)
@example(shape=(17, 4128), tokens=1, kept=0.1, cut=Cut(16, 128, 4), seed=0)
@given(
    shape=st.tuples(st.integers(1, 40), st.sampled_from([32, 96, 544, 2080])),
    tokens=st.sampled_from([1, 4, 16, 20]),
    kept=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    cut=st.builds(Cut, *map(st.sampled_from, [(16, 32), (32, 128), (1, 2, 5)])),
    seed=st.integers(0, 2**31),
)
def test_products_with_a_bitmap_are_those_with_the_dense_weight(shape, tokens, kept, cut, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < kept
    mask[1:-1:3] = False
    layout = BitmapLayout.from_mask(mask)
    # Sums of small integers are the same in any order.
    weight = torch.randint(-3, 4, shape, generator=generator).half()
    inputs = torch.randint(-3, 4, (tokens, shape[1]), generator=generator).half()
    expected = F.linear(inputs.float(), (weight * mask).float()).half()
    assert torch.equal(spmm_t(inputs, layout.compress(weight), layout, cut), expected)
