from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_axosparse.pruning.densities import shares
from lightning_axosparse.pruning.selection import highest
from lightning_axosparse.pruning.stage_balance import balanced, kept_by_stage, limit_stages
from tests.pruning.stages import SHARED, make_parameters, on_stage
from tests.ranks import run_ranks


def sizes_of(scores):
    return {name: score.shape for name, score in scores.items()}


def stages_of(scores, stages):
    return {
        name: {s for s in range(stages) if name in on_stage(scores, stages, s)[0]}
        for name in scores
    }


def global_share(scores, ratio, floor=0.0):
    [share] = shares(sizes_of(scores), ratio, "global", floor)
    return share


def kept_of(masks):
    return {name: int(mask.sum()) for name, mask in masks.items()}


def taken_in_turn(scores, stages, common, limit):
    """The definition: take entries by descending score, but none of a full stage.

    Of those that several stages hold, ``common`` are taken. Of equal scores the last comes first.
    """
    order = sorted(
        (
            (float(score.reshape(-1)[i]), n, i, name)
            for n, (name, score) in enumerate(scores.items())
            for i in range(score.numel())
        ),
        key=lambda entry: entry[:3],
        reverse=True,
    )
    room = {frozenset([s]): limit for held in stages.values() for s in held}
    masks = {name: torch.zeros(score.numel(), dtype=torch.bool) for name, score in scores.items()}
    for _, _, index, name in order:
        held = frozenset(stages[name])
        if len(held) > 1:
            taken, common = common > 0, common - 1
        else:
            taken = room[held] > 0
            room[held] -= 1
        masks[name][index] = taken
    return masks


def least_limit(scores, stages, total, imbalance):
    own = kept_by_stage({name: score.numel() for name, score in scores.items()}, stages)
    limit = -(-imbalance * total // len(own))
    while sum(min(entries, limit) for entries in own.values()) < total:
        limit += 1
    return limit


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.floats(0, 0.99),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.25, 1.5, 2.0, 10.0]),
)
def test_no_stage_keeps_more_and_the_best_entries_are_kept(seed, ties, ratio, number, imbalance):
    scores = make_parameters(seed, torch.float64, ties)
    stages, share = stages_of(scores, number), global_share(scores, ratio)
    free = kept_of(highest(scores, [share]))
    masks = balanced(scores, share, stages, imbalance)
    kept = kept_of(masks)
    assert sum(kept.values()) == share.kept
    by_stage, before = kept_by_stage(kept, stages), kept_by_stage(free, stages)
    total = sum(before.values())
    limit = least_limit(scores, stages, total, imbalance)
    assert max(by_stage.values()) <= limit
    if number > 1:
        assert kept[SHARED] == free[SHARED]
    # The score of what is kept is the best that the limits allow.
    best = taken_in_turn(scores, stages, free[SHARED] if number > 1 else 0, limit)
    surplus = sum(kept_of(best).values()) - share.kept
    own = sorted(
        float(score.reshape(-1)[i])
        for name, score in scores.items()
        if len(stages[name]) == 1
        for i in best[name].nonzero()[:, 0]
    )
    expected = own[surplus:]
    found = sorted(
        float(value)
        for name, score in scores.items()
        if len(stages[name]) == 1
        for value in score[masks[name]]
    )
    assert found == expected
    if max(before.values()) <= limit:
        assert all(
            torch.equal(masks[name], mask) for name, mask in highest(scores, [share]).items()
        )


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0, 0.95), st.floats(0, 1), st.integers(2, 4))
def test_floors_hold_as_far_as_the_limit_lets_them(seed, ratio, floor, number):
    scores = make_parameters(seed, torch.float32, False)
    stages, share = stages_of(scores, number), global_share(scores, ratio, floor)
    kept = kept_of(balanced(scores, share, stages, 1.0))
    assert sum(kept.values()) == share.kept
    by_stage = kept_by_stage(kept, stages)
    for name, count in kept.items():
        if len(stages[name]) == 1:
            [stage] = stages[name]
            own = sum(s.numel() for n, s in scores.items() if stages[n] == {stage})
            density = min(share.floor, by_stage[stage] / own)
            assert count >= int(density * scores[name].numel())


def test_the_fullest_stage_gives_way_to_the_next_best_of_the_others():
    scores = {
        "a": torch.arange(100.0, 110.0),
        "b": torch.arange(10.0),
        "c": torch.arange(20.0, 30.0),
        "all": torch.tensor([104.5, 0.5]),
    }
    stages = {"a": {0}, "b": {1}, "c": {1}, "all": {0, 1}}
    share = global_share(scores, 0.75)
    assert kept_of(highest(scores, [share])) == {"a": 7, "b": 0, "c": 0, "all": 1}
    masks = balanced(scores, share, stages, 1.5)
    assert kept_of(masks) == {"a": 6, "b": 0, "c": 1, "all": 1}
    assert masks["a"].tolist() == [False] * 4 + [True] * 6
    assert masks["c"].tolist() == [False] * 9 + [True]
    assert kept_of(balanced(scores, share, stages, 1.0)) == {"a": 4, "b": 0, "c": 3, "all": 1}


def test_a_stage_that_has_too_little_leaves_the_rest_to_the_others():
    sizes = {"a": torch.Size([100]), "b": torch.Size([10])}
    [share] = shares(sizes, 0.5)
    stages = {"a": {0}, "b": {1}}
    limited = limit_stages(share, {"a": 54, "b": 1}, stages, 1.2)
    assert [(list(part.sizes), part.kept) for part in limited] == [(["a"], 45), (["b"], 10)]
    assert limit_stages(share, {"a": 45, "b": 10}, stages, 1.2) is None


CASES = [
    (seed, ties, 0.7, most) for seed in range(4) for ties in (False, True) for most in (1, 1.5)
]


def masks_of_a_stage():
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.backend import init_process_group

    init_process_group("cpu")
    found = []
    for seed, ties, ratio, most in CASES:
        scores = make_parameters(seed, torch.float32, ties)
        held, counted = on_stage(scores, 2, dist.get_rank())
        own = {name: held[name] for name in scores if name in counted}
        stages, share = stages_of(scores, 2), global_share(scores, ratio, 0.1)
        found.append(balanced(own, share, stages, most, dist.group.WORLD))
    dist.destroy_process_group()
    return found


def test_ranks_compute_the_masks_of_one_process():
    ranks = run_ranks(2, masks_of_a_stage)
    for number, (seed, ties, ratio, most) in enumerate(CASES):
        scores = make_parameters(seed, torch.float32, ties)
        expected = balanced(scores, global_share(scores, ratio, 0.1), stages_of(scores, 2), most)
        merged = {**ranks[0][number], **ranks[1][number]}
        assert all(torch.equal(merged[name], mask) for name, mask in expected.items())
