from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.pruning.bitmask import MaskBits
from lightning_axosparse.pruning.mask_distance import overlap_distance
from lightning_axosparse.pruning.mask_window import MaskWindow


def series(seed, number):
    generator = torch.Generator().manual_seed(seed)
    masks = [{"a": torch.rand(5, 4, generator=generator) < 0.5} for _ in range(number)]
    return masks, [MaskBits(each) for each in masks]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 5))
def test_the_distance_is_the_largest_to_the_others_of_the_window(seed, number, size):
    masks, bits = series(seed, number)
    window = MaskWindow(size, "overlap")
    for position, each in enumerate(bits):
        found = window.add(each, {"a"}, None, None)
        others = masks[max(0, position + 1 - size) : position]
        expected = [overlap_distance(masks[position], other, {"a"}) for other in others]
        assert found == max(expected, default=None)
        assert window.full == (position + 1 >= size)


def test_it_goes_on_with_its_state_and_begins_anew_when_cleared():
    _, bits = series(0, 4)
    window, again = MaskWindow(3, "hamming"), MaskWindow(3, "hamming")
    for each in bits[:3]:
        window.add(each, {"a"}, None, None)
    state = window.gather_state({"a"}, None)
    again.load_state(state)
    assert again.full
    assert again.add(bits[3], {"a"}, None, None) == window.add(bits[3], {"a"}, None, None)
    window.clear()
    assert not window.full
    assert window.add(bits[0], {"a"}, None, None) is None
