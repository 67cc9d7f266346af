"""Meetings: what ranks compare at both ends of a loop, without ranks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.adapters.meetings import Attendance, Meetings, refuse_apart
from lightning_axosparse.grid import Grid
from lightning_axosparse.groups import Groups

FIRST = Attendance("rank 0", 0, "training of epoch 3 ends", "training", 4, (), False)
INFINITE = float("inf")


def test_ranks_that_agree_go_on() -> None:
    refuse_apart([FIRST, replace(FIRST, who="rank 1")])
    refuse_apart([replace(FIRST, lengths=(INFINITE,)), replace(FIRST, lengths=(INFINITE,))])


def test_ranks_at_different_places() -> None:
    other = replace(FIRST, who="rank 1", occasion="training ends", batches=None, stops=True)
    with pytest.raises(MisconfigurationException) as refusal:
        refuse_apart([FIRST, other])
    assert "rank 0: training of epoch 3 ends after 4 batches\n" in str(refusal.value)
    assert "rank 1: training ends, trainer.should_stop is set" in str(refusal.value)


def test_numbers_of_batches_that_differ() -> None:
    with pytest.raises(MisconfigurationException, match=r"rank 1.* after 3 batches"):
        refuse_apart([FIRST, replace(FIRST, who="rank 1", batches=3)])


def test_a_length_that_is_known_on_one_rank_only() -> None:
    known, unknown = replace(FIRST, lengths=(4, 2)), replace(FIRST, lengths=(4, INFINITE))
    with pytest.raises(MisconfigurationException) as refusal:
        refuse_apart([known, unknown])
    assert "loader length 4, 2" in str(refusal.value)
    assert "loader length 4, unknown" in str(refusal.value)


def test_replicas_may_evaluate_different_numbers_of_batches() -> None:
    ranks = [replace(FIRST, loop="test", feed=feed, batches=3 + feed) for feed in (0, 0, 1, 1)]
    refuse_apart(ranks)
    with pytest.raises(MisconfigurationException, match="unequal numbers of test batches"):
        refuse_apart([*ranks, replace(ranks[0], batches=9)])


def test_a_users_copy_of_the_callbacks_has_the_same_meetings() -> None:
    meetings = Meetings(Groups(Grid(1, 1), "cpu"))
    assert deepcopy([meetings])[0] is meetings
