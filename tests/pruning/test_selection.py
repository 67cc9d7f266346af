from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from lightning_axosparse.pruning.selection import Share, highest, shares
from tests.pruning.stages import make_parameters, on_stage
from tests.ranks import run_ranks

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


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
floors = st.sampled_from([0.0, 0.1, 0.7, 1.0])


def sizes_of(scores):
    return {name: score.shape for name, score in scores.items()}


def one_process(scores, ratio, scope="global", floor=0.0, stages=None):
    return highest(scores, shares(sizes_of(scores), ratio, scope, floor, stages))


def sorted_masks(scores, kept, floor=0.0):
    """The definition: sort all scores, ties in global order, and keep the last.

    The highest of each weight, as many as its floor, come after all others.
    """
    flat = torch.cat([s.reshape(-1).double() for s in scores.values()])
    safe = []
    for score in scores.values():
        own = torch.zeros(score.numel(), dtype=torch.bool)
        least = int(floor * kept * score.numel() / len(flat))
        own[score.reshape(-1).double().argsort(stable=True)[score.numel() - least :]] = True
        safe.append(own)
    flat[torch.cat(safe)] = torch.inf
    mask = torch.ones(len(flat), dtype=torch.bool)
    mask[flat.argsort(stable=True)[: len(flat) - kept]] = False
    parts = mask.split([score.numel() for score in scores.values()])
    return {name: part.view(scores[name].shape) for name, part in zip(scores, parts, strict=True)}


def assert_equal(masks, expected):
    assert list(masks) == list(expected)
    for name, mask in masks.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected[name]), name


def kept_of(scores, ratio):
    entries = sum(score.numel() for score in scores.values())
    return entries - round(ratio * entries)


@given(st.integers(0, 10**6), dtypes, st.booleans(), st.floats(0, 0.999), floors)
def test_the_global_threshold_is_exact(seed, dtype, ties, ratio, floor):
    """Scores of both signs."""
    scores = make_parameters(seed, dtype, ties)
    expected = sorted_masks(scores, kept_of(scores, ratio), floor)
    assert_equal(one_process(scores, ratio, floor=floor), expected)


@given(st.integers(0, 10**6), dtypes, st.booleans(), st.floats(0, 0.999))
def test_layer_scope_prunes_each_weight_by_the_ratio(seed, dtype, ties, ratio):
    scores = make_parameters(seed, dtype, ties)
    expected = {
        name: sorted_masks({name: s}, kept_of({name: s}, ratio))[name] for name, s in scores.items()
    }
    assert_equal(one_process(scores, ratio, "layer", floor=0.3), expected)


def test_every_weight_keeps_its_floor_and_the_whole_its_number():
    torch.manual_seed(0)
    scores = {"low": torch.rand(40, 50), "high": 1 + torch.rand(100, 80)}
    for floor, low in ((0.0, 0), (0.25, 100), (1.0, 400)):
        masks = one_process(scores, 0.8, floor=floor)
        assert int(masks["low"].sum()) == low
        assert sum(int(mask.sum()) for mask in masks.values()) == 2000
        kept, pruned = scores["low"][masks["low"]], scores["low"][~masks["low"]]
        assert low == 0 or kept.min() > pruned.max()


def test_mixed_precisions_extremes_and_zeros_of_both_signs():
    scores = {
        "a": torch.tensor([[float("inf"), 1e-45, 0.0, -0.0]]),
        "b": torch.tensor([[-1e300, 1.0, 1e-320, -float("inf")]], dtype=torch.float64),
        "c": torch.tensor([[3e38, -1e-40]], dtype=torch.bfloat16),
    }
    for ratio in (0.1, 0.2, 0.5, 0.8, 0.9):
        assert_equal(one_process(scores, ratio), sorted_masks(scores, kept_of(scores, ratio)))


def test_strided_scores_keep_their_own_order():
    score = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    masks = one_process({"w": score}, 0.7)
    assert_equal(masks, sorted_masks({"w": score.contiguous()}, kept_of({"w": score}, 0.7)))


def test_all_may_be_kept_and_none():
    scores = make_parameters(0, torch.float32, ties=False)
    assert all(mask.all() for mask in one_process(scores, 0.0).values())
    masks = highest(scores, [Share(sizes_of(scores), 0)])
    assert not any(mask.any() for mask in masks.values())


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_nan_is_rejected_by_name(scope):
    scores = make_parameters(0, torch.float32, ties=False)
    scores["b.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        one_process(scores, 0.5, scope)


CASES = [
    (seed, dtype, ties, ratio, scope, floor)
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    for ties in (False, True)
    for ratio in (0.0, 0.5, 0.9, 0.99)
    for scope, floor in (
        ("global", 0.0),
        ("global", 0.5),
        ("layer", 0.0),
        ("uniform-stage", 0.1),
    )
]


def stages_of(scores, stages):
    return {
        name: [s for s in range(stages) if name in on_stage(scores, stages, s)[0]]
        for name in scores
    }


def masks_of_a_stage(stage, stages, group):
    found = []
    for seed, dtype, ties, ratio, scope, floor in CASES:
        scores = make_parameters(seed, dtype, ties)
        held, counted = on_stage(scores, stages, stage)
        own = {name: held[name] for name in scores if name in counted}
        where = stages_of(scores, stages)
        every = shares(sizes_of(scores), ratio, scope, floor, where)
        found.append(highest(own, every, group))
    if "b.weight" in own:
        own["b.weight"] = own["b.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        highest(own, shares(sizes_of(scores), 0.5), group)
    return found


def on_two_and_three_stages():
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    rank, two = dist.get_rank(), dist.new_group([0, 1])
    found = {3: masks_of_a_stage(rank, 3, dist.group.WORLD)}
    if rank < 2:
        found[2] = masks_of_a_stage(rank, 2, two)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def masks_by_rank():
    return run_ranks(3, on_two_and_three_stages)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_compute_the_masks_of_one_process(masks_by_rank, stages):
    for number, (seed, dtype, ties, ratio, scope, floor) in enumerate(CASES):
        scores = make_parameters(seed, dtype, ties)
        expected = one_process(scores, ratio, scope, floor, stages_of(scores, stages))
        merged = {}
        for stage in range(stages):
            merged.update(masks_by_rank[stage][stages][number])
        assert_equal({name: merged[name] for name in scores}, expected)
