"""Masks and distances over real ranks are those of one process."""

from __future__ import annotations

import pytest
import torch

from lightning_axosparse.pruning.distance import DISTANCES
from lightning_axosparse.pruning.masks import magnitude_masks
from tests.pruning.stages import deal, make_parameters
from tests.ranks import run_ranks

CASES = [
    (seed, dtype, ties, ratio, scope)
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    for ties in (False, True)
    for ratio in (0.0, 0.5, 0.9, 0.99)
    for scope in ("global", "layer")
]


def find(held, counted, parameters, ratio, scope, group):
    sizes = {name: parameter.shape for name, parameter in parameters.items()}
    return magnitude_masks(held, counted, sizes, ratio, scope, group)


def on_a_stage(stage, stages, group, cases):
    found = []
    for seed, dtype, ties, ratio, scope in cases:
        parameters = make_parameters(seed, dtype, ties)
        held, counted = deal(parameters, stages, stage)
        held["not.prunable"] = torch.ones(3)
        masks = find(held, counted, parameters, ratio, scope, group)
        older = {name: mask.flip(0) for name, mask in masks.items()}
        distances = [distance(masks, older, counted, group) for distance in DISTANCES.values()]
        found.append((masks, distances))
    if "b.weight" in counted:
        held["b.weight"] = held["b.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        find(held, counted, parameters, 0.5, "global", group)
    return found


def on_two_and_three_stages(cases):
    import torch.distributed as dist

    from lightning_axosparse.mpi.backend import destroy_process_group, init_process_group

    init_process_group("cpu")
    rank, two = dist.get_rank(), dist.new_group([0, 1])
    found = {3: on_a_stage(rank, 3, dist.group.WORLD, cases)}
    if rank < 2:
        found[2] = on_a_stage(rank, 2, two, cases)
    destroy_process_group()
    return found


@pytest.fixture(scope="module")
def by_rank():
    return run_ranks(3, on_two_and_three_stages, CASES)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_find_what_one_process_finds(by_rank, stages):
    for number, (seed, dtype, ties, ratio, scope) in enumerate(CASES):
        parameters = make_parameters(seed, dtype, ties)
        expected = find(parameters, parameters.keys(), parameters, ratio, scope, None)
        older = {name: mask.flip(0) for name, mask in expected.items()}
        for stage in range(stages):
            masks, distances = by_rank[stage][stages][number]
            held, _ = deal(parameters, stages, stage)
            assert list(masks) == [name for name in parameters if name in held]
            assert all(torch.equal(mask, expected[name]) for name, mask in masks.items())
            assert distances == [d(expected, older, expected.keys()) for d in DISTANCES.values()]
