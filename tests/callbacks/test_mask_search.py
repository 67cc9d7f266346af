from __future__ import annotations

from unittest.mock import Mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.callbacks.mask_search import MaskSearch
from lightning_axosparse.callbacks.times import Progress
from lightning_axosparse.pruning.masks import MaskBits, mask_distance


def search_of(window, distance):
    return MaskSearch(1, None, distance, threshold=0.5, window=window)


def is_full(search):
    """Only then do masks that agree end the search."""
    return search.is_over(Mock(), Progress(1), 0.0, on_step=True)


def series(seed, number):
    generator = torch.Generator().manual_seed(seed)
    masks = [{"a": torch.rand(5, 4, generator=generator) < 0.5} for _ in range(number)]
    return masks, [MaskBits(each) for each in masks]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 5))
def test_the_distance_is_the_largest_to_the_others_of_the_window(seed, number, size):
    masks, bits = series(seed, number)
    search = search_of(size, "relative")
    for position, each in enumerate(bits):
        found = search.add(each, {"a"}, None, None)
        others = masks[max(0, position + 1 - size) : position]
        expected = [mask_distance("relative", masks[position], other, {"a"}) for other in others]
        assert found == max(expected, default=None)
        assert is_full(search) == (position + 1 >= size)


def test_it_goes_on_with_its_state_and_begins_anew_when_cleared():
    _, bits = series(0, 4)
    search, again = search_of(3, "hamming"), search_of(3, "hamming")
    for each in bits[:3]:
        search.add(each, {"a"}, None, None)
    again.load_state({**search.state_dict(), "window": search.gather_masks({"a"}, None)})
    assert is_full(again)
    assert again.add(bits[3], {"a"}, None, None) == search.add(bits[3], {"a"}, None, None)
    search.clear()
    assert not is_full(search)
    assert search.add(bits[0], {"a"}, None, None) is None
