"""LoopCheck: what ranks compare at both ends of a loop, without ranks."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.strategy.compat.loops import (
    LoopCheck,
    LoopPosition,
    validate_positions,
)
from tests.parity.cases import trainer

FIRST = LoopPosition("rank 0", 0, "training of epoch 3 ends", "training", 4, (), False)
INFINITE = float("inf")


def test_ranks_that_agree_go_on() -> None:
    validate_positions([FIRST, replace(FIRST, who="rank 1")])
    validate_positions([replace(FIRST, lengths=(INFINITE,)), replace(FIRST, lengths=(INFINITE,))])


def test_ranks_at_different_places() -> None:
    other = replace(FIRST, who="rank 1", occasion="training ends", batches=None, stops=True)
    with pytest.raises(MisconfigurationException) as refusal:
        validate_positions([FIRST, other])
    assert "rank 0: training of epoch 3 ends after 4 batches\n" in str(refusal.value)
    assert "rank 1: training ends, trainer.should_stop is set" in str(refusal.value)


def test_numbers_of_batches_that_differ() -> None:
    with pytest.raises(MisconfigurationException, match=r"rank 1.* after 3 batches"):
        validate_positions([FIRST, replace(FIRST, who="rank 1", batches=3)])


def test_a_length_that_is_known_on_one_rank_only() -> None:
    known, unknown = replace(FIRST, lengths=(4, 2)), replace(FIRST, lengths=(4, INFINITE))
    with pytest.raises(MisconfigurationException) as refusal:
        validate_positions([known, unknown])
    assert "loader length 4, 2" in str(refusal.value)
    assert "loader length 4, unknown" in str(refusal.value)


def test_replicas_may_evaluate_different_numbers_of_batches() -> None:
    ranks = [replace(FIRST, loop="test", data_rank=rank, batches=3 + rank) for rank in (0, 0, 1, 1)]
    validate_positions(ranks)
    with pytest.raises(MisconfigurationException, match="unequal numbers of test batches"):
        validate_positions([*ranks, replace(ranks[0], batches=9)])


def test_a_users_copy_of_the_callbacks_has_the_same_process_groups() -> None:
    check = LoopCheck(ProcessGroups(Grid(1, 1)))
    assert deepcopy([check])[0] is check


def test_it_is_the_first_callback_until_the_context_ends() -> None:
    run, check, added = trainer(), LoopCheck(ProcessGroups(Grid(1, 1))), Callback()
    before = list(run.callbacks)
    with check.added_to(run):
        assert run.callbacks == [check, *before]
        run.callbacks = [added, *run.callbacks]
    assert run.callbacks == [added, *before]
    with check.added_to(run):
        run.callbacks = before
    assert run.callbacks == before
