from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.support.corrupt_file import CorruptFileError

shapes = st.dictionaries(
    st.sampled_from(["a", "b.weight", "c.0.weight"]),
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
)


def masks_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(shape, generator=generator) < 0.5 for name, shape in shapes.items()}


def assert_holds(packed, masks):
    assert list(packed) == list(masks)
    assert len(packed) == len(masks)
    for name, mask in masks.items():
        assert packed[name].dtype == torch.bool
        assert torch.equal(packed[name], mask)
        assert packed.shapes[name] == mask.shape


@given(shapes, st.integers(0, 1000))
def test_masks_are_read_back_as_given(shapes, seed):
    masks = masks_of(shapes, seed)
    packed = MaskBits(masks)
    assert_holds(packed, masks)
    assert_holds(MaskBits.from_state_dict(packed.state_dict()), masks)
    assert_holds(pickle.loads(pickle.dumps(packed)), masks)
    names = list(masks)[::-1][:2]
    assert_holds(packed.only([*names, "elsewhere"]), {name: masks[name] for name in names})
    merged = MaskBits.merged([packed.only([name]) for name in masks])
    assert merged == packed
    assert packed == MaskBits(masks)


def test_masks_differ_by_bits_names_and_shapes():
    packed = MaskBits(masks_of({"a": [3, 4]}))
    flipped = {"a": packed["a"].clone()}
    flipped["a"][0, 0] ^= True
    assert packed != MaskBits(flipped)
    assert packed != MaskBits({"b": packed["a"]})
    assert packed != MaskBits({"a": packed["a"].view(4, 3)})
    assert packed != {"a": packed["a"]}


def test_masks_take_one_bit_an_entry():
    masks = {"w": torch.ones(64, 64, dtype=torch.bool)}
    assert MaskBits(masks).state_dict()["bits"]["w"].nbytes == 64 * 64 // 8


def test_a_state_whose_bits_do_not_fit_the_shape_is_rejected():
    state = MaskBits({"w": torch.ones(4, 4, dtype=torch.bool)}).state_dict()
    longer = MaskBits({"w": torch.ones(4, 6, dtype=torch.bool)}).state_dict()
    with pytest.raises(CorruptFileError, match="one bit per entry"):
        MaskBits.from_state_dict({**state, "bits": longer["bits"]})
