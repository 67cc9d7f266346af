from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.strategy.regrid.min_stages import (
    RankMemory,
    fewest_stages,
    model_state_bytes,
)


def partition(stages: int, layers: int = 8) -> Partition:
    size = layers // stages
    parts = [range(stage * size, (stage + 1) * size) for stage in range(stages)]
    return Partition(
        [str(i) for i in range(layers)], [nn.Identity()] * layers, parts, [1.0] * layers, ""
    )


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
