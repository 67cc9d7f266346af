from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from lightning_axosparse.pruning.densities import Share, shares

SIZES = {"a": Size([100, 50]), "b": Size([10, 20]), "c": Size([30, 10, 3, 3])}
ENTRIES = 5000 + 200 + 2700
dims = st.lists(st.integers(1, 60), min_size=2, max_size=4)


def kept_alone(found):
    return {name: share.kept for share in found for name in share.sizes}


def test_the_scopes():
    assert shares(SIZES, 0.8, "global", 0.5) == [Share(SIZES, 1580, 0.1)]
    assert kept_alone(shares(SIZES, 0.8, "layer", 0.1)) == {"a": 1000, "b": 40, "c": 540}
    staged = shares(SIZES, 0.8, "uniform-stage", 0.1, {"a": {1}, "b": {0, 1}, "c": {0}})
    assert [(list(share.sizes), share.kept) for share in staged] == [
        (["b", "c"], 580),
        (["a"], 1000),
    ]
    assert shares(SIZES, 0.8, "uniform-stage", 0.1) == shares(SIZES, 0.8, "global", 0.1)


def test_given_densities_leave_the_rest_to_the_others():
    found = shares(SIZES, 0.677, {"*": 0.2, "[bc]": 0.5, "b": 1.0}, 0.1)
    assert kept_alone(found) == {"a": 1000, "b": 200, "c": 1350}
    found = shares(SIZES, 0.8, {"b": 1.0}, 0.5)
    assert [(list(share.sizes), share.kept) for share in found] == [
        (["b"], 200),
        (["a", "c"], 1380),
    ]
    assert found[1].floor == 0.5 * 1380 / 7700


@pytest.mark.parametrize(
    ("ratio", "densities", "message"),
    [
        (0.8, {"x": 0.5}, r"'x' matches no weight.*a, b, c"),
        (0.8, {"a": 0.5}, "other 2 weights would have to keep -920"),
        (0.1, {"a": 0.5}, "keep 4610 .*prune 0.3165 to 0.6835"),
        (0.8, {"*": 0.5}, "prune 0.5000 to 0.5000"),
    ],
)
def test_densities_that_contradict_the_ratio_are_refused(ratio, densities, message):
    with pytest.raises(ValueError, match=message):
        shares(SIZES, ratio, densities)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5])
def test_ratios_out_of_range_are_refused(ratio):
    with pytest.raises(ValueError, match=str(ratio)):
        shares(SIZES, ratio)


@given(st.lists(dims, min_size=1, max_size=8), st.floats(0, 0.999), st.floats(0, 1))
def test_floors_never_keep_more_than_there_is(shapes, ratio, floor):
    [share] = shares({str(n): Size(s) for n, s in enumerate(shapes)}, ratio, "global", floor)
    assert sum(map(share.least, share.sizes)) <= share.kept
    assert all(share.least(name) <= size.numel() for name, size in share.sizes.items())


def test_a_floor_is_a_share_of_what_all_would_keep_alike():
    [share] = shares(SIZES, 0.8, "global", 0.1)
    assert [share.least(name) for name in SIZES] == [100, 4, 54]
