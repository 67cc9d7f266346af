from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.callbacks.moments import WHEN, Moment, Progress


def hundred():
    return 100


def never_asked():
    raise AssertionError("the total is asked for shares only")


@pytest.mark.parametrize(
    ("when", "moment"),
    [
        (7, Moment(7, "steps")),
        ("1 epoch", Moment(1, "epochs")),
        ("12 epochs", Moment(12, "epochs")),
    ],
)
def test_steps_and_epochs(when, moment):
    assert WHEN.fits(when)
    assert Moment.of(when, never_asked) == moment


@pytest.mark.parametrize(("share", "steps"), [(0.25, 25), (1.0, 100), (0.333, 33), (1e-9, 1)])
def test_shares_of_the_run(share, steps):
    assert WHEN.fits(share)
    assert Moment.of(share, hundred) == Moment(steps, "steps")


@pytest.mark.parametrize("when", ["", "1", "0 epochs", "1.5 epochs", "-1 epochs", "1 epochs ", "x"])
def test_other_texts_do_not_fit(when):
    assert not WHEN.fits(when)


@given(st.integers(1, 50), st.lists(st.integers(0, 200), min_size=2, max_size=20, unique=True))
def test_it_comes_again_once_for_each_multiple_that_is_passed(count, steps):
    moment, seen = Moment(count, "steps"), [Progress(0), *map(Progress, sorted(steps))]
    again = [moment.again_since(one, two) for one, two in pairwise(seen)]
    passed = [
        any(step % count == 0 for step in range(one.steps + 1, two.steps + 1))
        for one, two in pairwise(seen)
    ]
    assert again == passed
    assert [moment.reached(at) for at in seen] == [at.steps >= count for at in seen]


def test_epochs_are_counted_when_they_have_ended():
    moment = Moment(2, "epochs")
    assert not moment.reached(Progress(500, 1))
    assert moment.reached(Progress(8, 2))
    assert moment.again_since(Progress(8, 3), Progress(9, 4))
    assert not moment.again_since(Progress(8, 2), Progress(900, 3))
