from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.sparse.store import layout as layout_module
from lightning_axosparse.sparse.store.formats import FORMATS, BitmapLayout, SegmentLayout, layout_of
from lightning_axosparse.sparse.store.layout import Tile, block_rows, index_dtype

shapes = st.one_of(
    st.lists(st.integers(0, 6), max_size=4),
    st.tuples(st.integers(1, 70), st.sampled_from([1, 7, 64, 257, 5000])),
)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
every_format = pytest.mark.parametrize("index_format", FORMATS)


@pytest.fixture
def small_tiles(monkeypatch):
    """A tile is a single block, so that tensors of some 10 000 entries have several."""
    monkeypatch.setitem(layout_module.TILE_ENTRIES, "cpu", 1)


def drawn_mask(shape, ratio, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < ratio
    if mask.dim() > 1 and len(mask) > 2:
        mask[1:-1:2] = False  # rows of which all entries are pruned
    return mask


@every_format
@settings(max_examples=40, deadline=None)
@given(
    shape=shapes,
    dtype=dtypes,
    ratio=st.sampled_from([0.0, 0.003, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_densify_and_compress_agree_with_the_mask(index_format, shape, dtype, ratio, seed):
    mask = drawn_mask(shape, ratio, seed)
    dense = torch.randn(tuple(shape)).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(layout_module.TILE_ENTRIES, "cpu", 8192)
        layout = layout_of(mask, index_format)
        values = layout.compress(dense)
        assert layout.nnz == mask.sum()
        assert torch.equal(layout.positions().long(), mask.reshape(-1).nonzero().squeeze(1))
        assert torch.equal(layout.mask(), mask)
        assert torch.equal(values, dense[mask])
        expected = dense.where(mask, torch.zeros((), dtype=dtype))
        assert torch.equal(layout.densify(values), expected)


@every_format
@pytest.mark.parametrize("shape", [(96, 130), (30, 10, 41), (9000,), (3, 6000)])
def test_tiles_are_whole_rows_that_cover_the_tensor(index_format, shape, small_tiles):
    mask = drawn_mask(shape, 0.2, 0)
    layout = layout_of(mask, index_format)
    assert len(layout.tiles) > 1
    assert torch.equal(torch.cat([mask[tile.rows] for tile in layout.tiles]), mask)
    for tile in layout.tiles:
        part = mask[tile.rows]
        assert (tile.numel, tile.nnz) == (part.numel(), part.sum())
        assert torch.equal(layout.positions_in(tile), part.flatten().nonzero().squeeze(1))


@pytest.mark.parametrize("shape", [(), (7,), (10, 3), (100, 4096), (5, 70_000), (0, 3), (3, 0)])
def test_a_block_is_a_multiple_of_eight_entries(shape):
    entries = layout_module.block_entries(torch.Size(shape))
    assert entries % 8 == 0
    assert block_rows(torch.Size(shape)) > 0


@every_format
def test_compress_reads_a_transposed_tensor_in_its_own_order(index_format):
    dense = torch.arange(6.0).view(2, 3).t()
    assert layout_of(dense > 2, index_format).compress(dense).tolist() == [3, 4, 5]


STRIDED = {
    "one number": lambda: torch.tensor(2.0).expand(64, 16),
    "one row": lambda: torch.arange(16.0).expand(64, 16),
    "one column": lambda: torch.arange(64.0)[:, None].expand(64, 16),
    "a column of a matrix": lambda: torch.randn(64, 5)[:, 2:3],
    "a column, of one dimension": lambda: torch.randn(64, 5)[:, 2],
    "channels last": lambda: torch.randn(8, 3, 3, 16).permute(0, 3, 1, 2),
}


@every_format
@pytest.mark.parametrize("kind", STRIDED)
def test_compress_and_densify_take_any_strides(index_format, kind):
    dense = STRIDED[kind]()
    layout = layout_of(torch.rand(dense.shape) > 0.4, index_format)
    assert torch.equal(layout.compress(dense), dense[layout.mask()])
    values = torch.tensor(3.0).expand(layout.nnz)
    assert torch.equal(layout.densify(values), 3.0 * layout.mask())


@pytest.mark.parametrize(("density", "most"), [(0.5, 1.02), (0.2, 1.05), (0.1, 1.1), (0.05, 1.2)])
def test_the_default_takes_one_byte_per_unpruned_entry(density, most):
    layout = layout_of(torch.rand(1024, 1024) < density)
    assert layout.nnz < layout.nbytes < most * layout.nnz
    bits = layout_of(layout.mask(), "bitmap")
    assert bits.nbytes == 1024 * 1024 / 8 + 4 * 257


def test_indices_are_int32_below_two_to_the_31_entries():
    assert index_dtype(2**31 - 1) == torch.int32
    assert index_dtype(2**31) == torch.int64


def test_a_tensor_of_more_than_two_to_the_31_entries():
    """Three unpruned entries near its end; the tensor itself is one number seen 2^32 times."""
    shape = torch.Size([2**17, 2**15])
    positions = torch.tensor([2**31 + 5, 2**31 + 4000, 2**32 - 1])
    starts = torch.searchsorted(positions, torch.arange(0, 2**32 + 1, 2**15)).int()
    counts = torch.zeros(2**24, dtype=torch.int16)
    counts[positions // 256] = torch.tensor([1, 1, 1], dtype=torch.int16)
    layout = SegmentLayout(shape, 3, starts, counts, (positions % 256).to(torch.uint8))
    assert torch.equal(layout.positions(), positions)
    found = [tile.start + layout.positions_in(tile) for tile in layout.tiles if tile.nnz]
    assert torch.equal(torch.cat(found), positions)


stacks = given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 70), st.sampled_from([64, 65, 256, 600])),
    ratio=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)


@every_format
@settings(max_examples=40, deadline=None)
@stacks
def test_a_part_is_the_layout_of_some_slices(index_format, shape, ratio, seed, data):
    mask = drawn_mask(shape, ratio, seed)
    whole = layout_of(mask, index_format)
    first = data.draw(st.integers(0, len(mask) - 1))
    last = data.draw(st.none() | st.integers(first + 1, len(mask)))
    part_mask = mask[first] if last is None else mask[first:last]
    part, expected = whole.part(first, last), layout_of(part_mask, index_format)
    assert (part.shape, part.nnz) == (expected.shape, expected.nnz)
    assert torch.equal(part.starts, expected.starts)
    assert torch.equal(part.positions(), expected.positions())
    dense = torch.randn(part_mask.shape)
    assert torch.equal(part.compress(dense), dense[part_mask])
    assert torch.equal(part.mask(), part_mask)
    assert whole.part(first, last) is part
    if last is not None:
        assert torch.equal(part.part(0).mask(), part_mask[0])


@every_format
@settings(max_examples=40, deadline=None)
@stacks
def test_slices_are_joined_in_any_order(index_format, shape, ratio, seed, data):
    mask = drawn_mask(shape, ratio, seed)
    numbers = data.draw(st.lists(st.integers(0, len(mask) - 1), min_size=1, max_size=8))
    whole, stack = layout_of(mask, index_format), mask[numbers]
    joined, expected = whole.joined(numbers), layout_of(stack, index_format)
    assert joined.shape == stack.shape
    assert (joined.nnz, joined.edges) == (int(stack.sum()), expected.edges)
    assert torch.equal(joined.starts, expected.starts)
    assert torch.equal(joined.positions(), expected.positions())
    for at, number in enumerate(numbers):
        assert joined.part(at) is whole.part(number)


@every_format
def test_parts_read_the_index_of_the_whole_and_follow_it(index_format):
    whole = layout_of(drawn_mask((4, 64, 128), 0.3, 0), index_format)
    part, field = whole.part(2), {"segments": "offsets", "bitmap": "bits"}[index_format]
    own, shared = getattr(part, field), getattr(whole, field)
    assert own.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()
    assert copy.copy(whole).part(2) is not part
    whole.move(torch.device("meta"))
    assert "_parts" not in vars(whole)


@every_format
def test_compress_raises_for_another_shape(index_format):
    layout = layout_of(torch.ones(2, 3, dtype=torch.bool), index_format)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        layout.compress(torch.zeros(3, 2))


@every_format
def test_same_entries(index_format):
    one = layout_of(torch.tensor([[True, False]]), index_format)
    assert one.same_entries(BitmapLayout.from_mask(torch.tensor([[True, False]])))
    assert not one.same_entries(BitmapLayout.from_mask(torch.tensor([[False, True]])))
    assert not one.same_entries(BitmapLayout.from_mask(torch.tensor([[True], [False]])))


@every_format
def test_move_changes_the_layout_and_to_copies_it(index_format):
    layout = layout_of(torch.tensor([[True, False]]), index_format)
    assert layout.to(torch.device("cpu")) is layout
    assert all(t.is_meta for t in layout.to(torch.device("meta")).tensors.values())
    assert not any(t.is_meta for t in layout.tensors.values())
    layout.move(torch.device("meta"))
    assert all(t.is_meta for t in layout.tensors.values())


@every_format
def test_copies_and_pickles_keep_the_entries(index_format):
    mask = drawn_mask((40, 130), 0.1, 1)
    layout = layout_of(mask, index_format)
    assert isinstance(layout.tiles[0], Tile)
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert torch.equal(other.mask(), mask)
