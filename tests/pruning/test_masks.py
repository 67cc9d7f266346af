from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pruning.masks import (
    MaskBits,
    mask_distance,
)
from lightning_axosparse.support.files import CorruptFileError
from tests.pruning.stages import make_parameters

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
    with pytest.raises(CorruptFileError, match="'w' does not have one bit per entry"):
        MaskBits.from_state_dict({**state, "bits": longer["bits"]})


def random_masks(seed, density):
    parameters = make_parameters(seed, torch.float32, ties=False)
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        {name: torch.rand(p.shape, generator=generator) < density for name, p in parameters.items()}
        for _ in range(2)
    ]


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_distances_by_their_definitions(seed, density):
    one, other = random_masks(seed, density)
    a, b = (torch.cat([m.reshape(-1) for m in masks.values()]).tolist() for masks in (one, other))
    kept_one, kept_other = ({i for i, keep in enumerate(mask) if keep} for mask in (a, b))
    hamming = sum(x != y for x, y in zip(a, b, strict=True)) / len(a)
    both = len(kept_one) + len(kept_other)
    overlap = 1 - 2 * len(kept_one & kept_other) / both if both else 0.0
    assert mask_distance("hamming", one, other, one.keys()) == pytest.approx(hamming)
    alike = 1 - both / (2 * len(a))  # what independent masks have in common
    relative = overlap / alike if alike else 0.0
    assert mask_distance("relative", one, other, one.keys()) == pytest.approx(relative)


def test_the_extremes():
    mask = torch.tensor([[True, False, False, False]])
    for distance, opposite in (("relative", 4 / 3), ("hamming", 0.5)):
        assert mask_distance(distance, {"w": mask}, {"w": mask}, {"w"}) == 0
        assert mask_distance(distance, {"w": mask}, {"w": mask.flip(1)}, {"w"}) == pytest.approx(
            opposite
        )
        assert mask_distance(distance, {}, {}, set()) == 0


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8, 0.98])
def test_independent_masks_are_one_apart_by_the_relative_distance_at_every_ratio(ratio):
    torch.manual_seed(0)
    one, other = ({"w": torch.rand(1000, 1000) >= ratio} for _ in range(2))
    assert mask_distance("relative", one, other, {"w"}) == pytest.approx(1, rel=0.02)
    half = {"w": torch.where(torch.arange(1000) < 500, one["w"], other["w"])}
    assert mask_distance("relative", one, half, {"w"}) == pytest.approx(0.5, rel=0.02)
