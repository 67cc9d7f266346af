from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.pipeline.shard.sharding import ReshardedTensor
from lightning_axosparse.strategy.regrid import (
    RankMemory,
    Regridded,
    fewest_stages,
    model_state_bytes,
    route,
)
from lightning_axosparse.strategy.validation import advise_on_parts_of_batches
from tests.parity.cases import Net, loader, trainer
from tests.ranks import run_ranks


def partition(stages: int, layers: int = 8) -> Partition:
    size = layers // stages
    parts = [range(stage * size, (stage + 1) * size) for stage in range(stages)]
    return Partition([str(i) for i in range(layers)], [nn.Identity()] * layers, parts, [1] * layers)


def memories(stages: int, state: int, activations: int, room: int) -> list[RankMemory]:
    """Every stage has its share of eight layers of ``state`` bytes, 10 bytes outside, ``room``."""
    parts = partition(stages).parts
    return [
        RankMemory(
            dict.fromkeys(part, state), 10, activations * len(part), room - 10 - state * len(part)
        )
        for part in parts
    ]


@pytest.mark.parametrize(
    ("room", "stages"),
    [(10 + 8 * (100 + 5), 1), (10 + 8 * 105 - 1, 2), (10 + 4 * 110, 2), (10 + 4 * 110 - 1, 4)],
)
def test_auto_takes_the_fewest_stages_that_fit(room: int, stages: int) -> None:
    assert fewest_stages(partition(4), memories(4, state=100, activations=5, room=room)) == stages


def test_auto_goes_by_the_rank_with_the_least_room() -> None:
    ranks = memories(4, state=100, activations=5, room=10_000)
    ranks[2] = RankMemory(ranks[2].layers, 10, 10, free=250)
    assert fewest_stages(partition(4), ranks) == 2


def test_auto_waits_until_a_micro_batch_was_measured() -> None:
    assert fewest_stages(partition(4), memories(4, state=100, activations=0, room=10_000)) is None


@given(st.sampled_from([1, 2, 4]), st.integers(0, 2000))
def test_auto_never_takes_less_with_less_room(now: int, room: int) -> None:
    fewer = fewest_stages(partition(now), memories(now, 100, 5, room + 100))
    more = fewest_stages(partition(now), memories(now, 100, 5, room))
    assert fewer is not None
    assert more is not None
    assert fewer <= more <= now


def test_state_counts_where_the_parameters_are() -> None:
    here, elsewhere = nn.Linear(3, 4), nn.Linear(3, 4, device="meta")
    for layer, size in ((here, 4 * 16 * (2 + 2)), (elsewhere, 0)):
        optimizer = torch.optim.AdamW(layer.parameters())
        for parameter in layer.parameters():
            moments = {key: torch.zeros(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter].update(moments)
        assert model_state_bytes(layer, [optimizer]) == size


@st.composite
def moves(draw: st.DrawFn) -> tuple[ReshardedTensor, list[tuple[Grid, Grid]]]:
    """A tensor, and the old and new grid as each rank sees them."""
    new = draw(st.integers(1, 4))
    old = new * draw(st.integers(1, 3))
    world = old * draw(st.integers(1, 3))
    before = draw(st.frozensets(st.integers(0, old - 1), min_size=1))
    after = draw(st.frozensets(st.integers(0, new - 1), min_size=1))
    grids = [Grid(world, old, rank) for rank in range(world)]
    tensor = nn.Parameter()
    return ReshardedTensor("x", tensor, before, after), [
        (grid, grid.shortened(new)) for grid in grids
    ]


@given(moves())
def test_every_rank_that_needs_a_tensor_is_sent_it_once_unless_it_has_it(
    case: tuple[ReshardedTensor, list[tuple[Grid, Grid]]],
) -> None:
    moved, grids = case
    routes = [route(moved, old, new) for old, new in grids]
    for rank, (old, new) in enumerate(grids):
        has, needs = old.stage in moved.before, new.stage in moved.after
        assert (rank in routes[rank].destinations) == (needs and not has)
        assert routes[rank].source // old.g_inter == old.replica
        assert routes[routes[rank].source] == routes[rank]
        assert grids[routes[rank].source][0].stage in moved.before


def test_a_move_prints_both_grids_and_their_bubbles() -> None:
    old = Grid(4, 4)
    moved = Regridded(old, old.shortened(2), epoch=3, seconds=0.5, microbatches=16)
    assert moved.bubbles == (3 / 19, 1 / 9)
    assert "2 stages x 2 replicas instead of 4 x 1" in str(moved)
    assert "11.1% instead of 15.8%" in str(moved)
    assert Regridded(old, old.shortened(1), 4, 0.1, 16).bubbles[1] == 0


@pytest.mark.parametrize(
    ("microbatches", "named"), [(4, "'behind' normalizes"), (1, "'layers.0', like 1 more,")]
)
def test_norms_that_get_a_part_of_the_batch_are_named(microbatches: int, named: str) -> None:
    module = nn.Module()
    module.layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    module.behind = nn.BatchNorm1d(4)
    with pytest.warns(UserWarning, match=f"From now on {named}"):
        advise_on_parts_of_batches(module, list(module.layers), microbatches)


class CountsStages(Net):
    """Notes the number of stages in the first batch of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[int] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.stages.append(self.trainer.strategy.grid.g_inter)


# A ticket that is drawn in epoch 1, never, and too late for another epoch.
DRAWN_BY: list[int | None] = [2, None, 3]


def grids_and_warnings() -> list[tuple[list[int], list[str]]]:
    """The number of stages in each of three epochs, and what is warned of ``regrid``."""
    found = []
    for epoch in DRAWN_BY:
        callbacks = (
            []
            if epoch is None
            else [EarlyBirdTicket(0.5, every="1 epoch", draw_by=f"{epoch} epochs")]
        )
        run = trainer(AxoSparseStrategy(g_inter=2, regrid=1), 2, callbacks=callbacks)
        module = CountsStages()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(module, loader(1, batches=2))
        said = [str(warning.message) for warning in caught]
        found.append((module.stages, [text for text in said if text.startswith("regrid=")]))
    return found


def test_a_run_moves_in_the_epoch_after_the_draw_and_warns_if_there_was_none() -> None:
    for rank, ((moved, no_word), (stayed, words), (late, none)) in enumerate(
        run_ranks(2, grids_and_warnings)
    ):
        assert (moved, no_word) == ([2, 2, 1], [])
        assert stayed == late == [2, 2, 2]
        assert none == []
        assert len(words) == (1 if rank == 0 else 0)
        assert all("regrid=1 changed nothing" in text for text in words)
        assert all("GradualPruning" in text for text in words)
