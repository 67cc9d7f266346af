from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Size

from lightning_axosparse.pruning.selection import minimum_counts, top_k_masks, unpruned_count
from tests.pruning.stages import make_parameters, on_stage
from tests.ranks import run_ranks

SIZES = {"a": Size([100, 50]), "b": Size([10, 20]), "c": Size([30, 10, 3, 3])}
dims = st.lists(st.integers(1, 60), min_size=2, max_size=4)


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5])
def test_ratios_out_of_range_are_refused(ratio):
    with pytest.raises(ValueError, match=str(ratio)):
        unpruned_count(SIZES, ratio)


@given(st.lists(dims, min_size=1, max_size=8), st.floats(0, 0.999), st.floats(0, 1))
def test_floors_never_keep_more_than_there_is(shapes, ratio, floor):
    sizes = {str(n): Size(s) for n, s in enumerate(shapes)}
    k = unpruned_count(sizes, ratio)
    least = minimum_counts(sizes, k, floor)
    assert sum(least.values()) <= k
    assert all(least[name] <= size.numel() for name, size in sizes.items())


def test_a_floor_is_a_share_of_what_all_would_keep_alike():
    assert unpruned_count(SIZES, 0.8) == 1580
    assert minimum_counts(SIZES, 1580, 0.1) == {"a": 100, "b": 4, "c": 54}


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
floors = st.sampled_from([0.0, 0.1, 0.7, 1.0])


def sizes_of(scores):
    return {name: score.shape for name, score in scores.items()}


def one_process(scores, ratio, floor=0.0):
    sizes = sizes_of(scores)
    k = unpruned_count(sizes, ratio)
    return top_k_masks(scores, scores.__getitem__, sizes, k, minimum_counts(sizes, k, floor))


def sorted_masks(scores, k, floor=0.0):
    """The definition: sort all scores, ties in global order, and keep the last.

    The highest of each weight, as many as its floor, come after all others.
    """
    flat = torch.cat([s.reshape(-1).double() for s in scores.values()])
    safe = []
    for score in scores.values():
        own = torch.zeros(score.numel(), dtype=torch.bool)
        least = int(floor * k * score.numel() / len(flat))
        own[score.reshape(-1).double().argsort(stable=True)[score.numel() - least :]] = True
        safe.append(own)
    flat[torch.cat(safe)] = torch.inf
    mask = torch.ones(len(flat), dtype=torch.bool)
    mask[flat.argsort(stable=True)[: len(flat) - k]] = False
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


def test_every_weight_keeps_its_floor_and_the_whole_its_number():
    torch.manual_seed(0)
    scores = {"low": torch.rand(40, 50), "high": 1 + torch.rand(100, 80)}
    for floor, low in ((0.0, 0), (0.25, 100), (1.0, 400)):
        masks = one_process(scores, 0.8, floor=floor)
        assert int(masks["low"].sum()) == low
        assert sum(int(mask.sum()) for mask in masks.values()) == 2000
        unpruned, pruned = scores["low"][masks["low"]], scores["low"][~masks["low"]]
        assert low == 0 or unpruned.min() > pruned.max()


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


def test_at_most_two_weights_have_scores_in_memory():
    stored = make_parameters(0, torch.float32, ties=False)
    alive = []

    def scores(name):
        assert sum(other() is not None for other in alive) <= 1
        computed = stored[name].detach().clone()
        alive.append(weakref.ref(computed))
        return computed

    sizes = sizes_of(stored)
    k = unpruned_count(sizes, 0.6)
    minimum = minimum_counts(sizes, k, 0.1)
    masks = top_k_masks(stored, scores, sizes, k, minimum)
    expected = one_process(stored, 0.6, 0.1)
    assert len(alive) > len(stored) > 2
    assert all(torch.equal(masks[name], expected[name]) for name in stored)


def test_all_may_be_kept_and_none():
    scores = make_parameters(0, torch.float32, ties=False)
    assert all(mask.all() for mask in one_process(scores, 0.0).values())
    masks = top_k_masks(scores, scores.__getitem__, sizes_of(scores), 0)
    assert not any(mask.any() for mask in masks.values())


def test_nan_is_rejected_by_name():
    scores = make_parameters(0, torch.float32, ties=False)
    scores["b.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        one_process(scores, 0.5)


CASES = [
    (seed, dtype, ties, ratio, floor)
    for seed, dtype in enumerate([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    for ties in (False, True)
    for ratio in (0.0, 0.5, 0.9, 0.99)
    for floor in (0.0, 0.5, 1.0)
]


def masks_of_a_stage(stage, stages, group):
    found = []
    for seed, dtype, ties, ratio, floor in CASES:
        scores = make_parameters(seed, dtype, ties)
        held, counted = on_stage(scores, stages, stage)
        own = {name: held[name] for name in scores if name in counted}
        sizes = sizes_of(scores)
        k = unpruned_count(sizes, ratio)
        minimum = minimum_counts(sizes, k, floor)
        found.append(top_k_masks(own, own.__getitem__, sizes, k, minimum, group))
    if "b.weight" in own:
        own["b.weight"] = own["b.weight"] * torch.nan
    with pytest.raises(ValueError, match=r"NaN in b\.weight"):
        top_k_masks(own, own.__getitem__, sizes, unpruned_count(sizes, 0.5), group=group)
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
    for number, (seed, dtype, ties, ratio, floor) in enumerate(CASES):
        scores = make_parameters(seed, dtype, ties)
        expected = one_process(scores, ratio, floor)
        merged = {}
        for stage in range(stages):
            merged.update(masks_by_rank[stage][stages][number])
        assert_equal({name: merged[name] for name in scores}, expected)
