from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.sparse import kernels
from lightning_axosparse.sparse import layout as layout_module
from lightning_axosparse.sparse.formats import FORMATS, layout_of
from lightning_axosparse.sparse.kernels import reference
from lightning_axosparse.timing import clock


def test_kernels_account_for_their_time():
    clock.reset()
    layout = layout_of(torch.eye(2, dtype=torch.bool))
    [tile] = layout.tiles
    dense, values = torch.empty(4), torch.empty(2)
    kernels.densify(layout, tile, torch.tensor([1.0, 2.0]), dense)
    assert dense.tolist() == [1, 0, 0, 2]
    assert clock.totals["densify"] > 0
    assert clock.totals["compress"] == 0
    kernels.compress(layout, tile, dense, values)
    assert values.tolist() == [1, 2]
    assert clock.totals["compress"] > 0


def test_scatter_and_gather_are_differentiable():
    indices = torch.tensor([1, 2], dtype=torch.int32)
    values = torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda v: reference.gather(reference.scatter(v, indices, (2, 2)).square(), indices), values
    )


@pytest.fixture(scope="module")
def fused():
    """The Triton kernels, in Triton's interpreter."""
    pytest.importorskip("triton")
    from lightning_axosparse.sparse.kernels import fused

    return fused


@pytest.mark.parametrize("index_format", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.sampled_from([1, 7, 130, 257])) | st.just((3, 5000)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kept=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_fused_kernels_agree_with_the_reference(fused, index_format, shape, dtype, kept, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(shape, generator=generator) < kept
    mask[1:-1:2] = False  # rows of which nothing is kept
    dense = torch.randn(shape, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_module.TILE_ENTRIES, "cpu", 8192)
        layout = layout_of(mask, index_format)
        values = layout.compress(dense)
        for tile in layout.tiles:
            part = values[tile.entries]
            results = [torch.full((tile.numel,), -7.0, dtype=dtype) for _ in range(2)]
            for kernel, out in zip((fused, reference), results, strict=True):
                kernel.densify(layout, tile, part, out)
            assert torch.equal(*results)
            read = torch.full((tile.nnz,), -7.0, dtype=dtype)
            fused.compress(layout, tile, dense[tile.rows].reshape(-1), read)
            assert torch.equal(read, part)
