from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_axosparse.pruning.mask_schedule import MaskSchedule, cubic_ratio

steps = st.integers(1, 500)


@given(steps, steps, steps)
def test_masks_change_from_its_beginning_to_before_its_end(begin, every, end):
    assume(begin < end)
    schedule = MaskSchedule(begin, every, end)
    changes = [step for step in range(600) if schedule.changes_after(step)]
    assert changes == list(range(begin, end, every))
    way = [schedule.progress(step) for step in range(600)]
    assert way == sorted(way)
    assert (way[begin], way[end]) == (0, 1)


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (6, 5)])
def test_it_ends_after_its_beginning(begin, end):
    with pytest.raises(ValueError, match=r"draw_by, after 5 .*draw_after"):
        MaskSchedule(begin, 1, end)


@given(st.floats(0.01, 0.99), st.lists(st.floats(0, 1), min_size=2))
def test_the_ratio_rises(ratio, way):
    way.sort()
    ratios = [cubic_ratio(ratio, at) for at in way]
    assert ratios == sorted(ratios)
    assert all(0 <= each <= ratio for each in ratios)


def test_the_formula_of_the_paper():
    """Zhu & Gupta, equation 1, with an initial ratio of 0."""
    assert [cubic_ratio(0.8, n / 4) for n in range(5)] == pytest.approx(
        [0, 0.8 * (1 - 27 / 64), 0.8 * (1 - 1 / 8), 0.8 * (1 - 1 / 64), 0.8]
    )
