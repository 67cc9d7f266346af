from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pruning.mask_distance import (
    DISTANCES,
    hamming_distance,
    overlap_distance,
    relative_distance,
)
from tests.pruning.stages import make_parameters, on_stage
from tests.ranks import run_ranks


def random_masks(seed, kept):
    parameters = make_parameters(seed, torch.float32, ties=False)
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        {name: torch.rand(p.shape, generator=generator) < kept for name, p in parameters.items()}
        for _ in range(2)
    ]


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_distances_by_their_definitions(seed, kept):
    one, other = random_masks(seed, kept)
    a, b = (torch.cat([m.reshape(-1) for m in masks.values()]).tolist() for masks in (one, other))
    kept_one, kept_other = ({i for i, keep in enumerate(mask) if keep} for mask in (a, b))
    hamming = sum(x != y for x, y in zip(a, b, strict=True)) / len(a)
    both = len(kept_one) + len(kept_other)
    overlap = 1 - 2 * len(kept_one & kept_other) / both if both else 0.0
    assert hamming_distance(one, other, one.keys()) == pytest.approx(hamming)
    assert overlap_distance(one, other, one.keys()) == pytest.approx(overlap)


def test_the_extremes():
    mask = torch.tensor([[True, False, False, False]])
    for distance, opposite in ((overlap_distance, 1.0), (hamming_distance, 0.5)):
        assert distance({"w": mask}, {"w": mask}, {"w"}) == 0
        assert distance({"w": mask}, {"w": mask.flip(1)}, {"w"}) == opposite
        assert distance({}, {}, set()) == 0


def test_overlap_tells_independent_masks_from_settled_ones_where_hamming_does_not():
    torch.manual_seed(0)
    one, other = ({"w": torch.rand(300, 300) < 0.05} for _ in range(2))
    assert hamming_distance(one, other, {"w"}) < 0.1
    assert overlap_distance(one, other, {"w"}) > 0.9


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.8, 0.98])
def test_independent_masks_are_one_apart_by_the_relative_distance_at_every_ratio(ratio):
    torch.manual_seed(0)
    one, other = ({"w": torch.rand(1000, 1000) >= ratio} for _ in range(2))
    assert relative_distance(one, other, {"w"}) == pytest.approx(1, rel=0.02)
    assert relative_distance(one, one, {"w"}) == relative_distance({}, {}, set()) == 0
    half = {"w": torch.where(torch.arange(1000) < 500, one["w"], other["w"])}
    assert relative_distance(one, half, {"w"}) == pytest.approx(0.5, rel=0.02)


def distances_of_a_stage():
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    one, other = random_masks(0, 0.3)
    held, counted = on_stage(one, 3, dist.get_rank())
    part = {name: other[name] for name in held}
    found = [distance(held, part, counted, dist.group.WORLD) for distance in DISTANCES.values()]
    dist.destroy_process_group()
    return found


def test_stages_measure_the_distances_of_one_process():
    one, other = random_masks(0, 0.3)
    expected = [distance(one, other, one.keys()) for distance in DISTANCES.values()]
    assert all(0 < distance < 1.5 for distance in expected)
    assert run_ranks(3, distances_of_a_stage) == [expected] * 3
