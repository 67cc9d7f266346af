"""What ``test_kernels.py`` runs in Triton's interpreter: the fused kernels and the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.sparse.kernels import fused, reference
from lightning_axosparse.sparse.store import layout as layout_module
from lightning_axosparse.sparse.store.formats import layout_of


@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 30), st.sampled_from([1, 7, 130, 257])) | st.just((3, 5000)),
    # Where a GPU rounds to bfloat16 the interpreter truncates; benchmarks.gpu.kernels compares it.
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.float16])] * 2)
    | st.just((torch.bfloat16, torch.bfloat16)),
    density=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_fused_kernels_agree_with_the_reference(shape, dtypes, density, seed):
    dtype, stored = dtypes
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < density
    mask[1:-1:2] = False  # rows of which all entries are pruned
    dense = torch.randn(shape, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_module.TILE_ENTRIES, "cpu", 8192)
        layout = layout_of(mask, "bitmap")
        values = layout.compress(dense).to(stored)
        for tile in layout.tiles:
            part = values[tile.entries]
            results = [torch.full((tile.numel,), -7.0, dtype=dtype) for _ in range(2)]
            fused.densify(*tile.index, part, results[0])
            reference.densify(layout.positions_in(tile), part, results[1])
            assert torch.equal(*results)
            read, expected = (torch.full((tile.nnz,), -7.0, dtype=stored) for _ in range(2))
            flat = dense[tile.rows].reshape(-1)
            fused.compress(*tile.index, flat, read)
            reference.compress(layout.positions_in(tile), flat, expected)
            assert torch.equal(read, expected)
