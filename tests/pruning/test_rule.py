from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.pruning.rule import MaskRule, MaskSchedule, cubic_ratio
from lightning_axosparse.sparse import sparsify

steps = st.integers(1, 500)


@given(steps, steps, steps)
def test_masks_change_from_its_beginning_to_before_its_end(begin, every, end):
    assume(begin < end)
    schedule = MaskSchedule(begin, every, end)
    changes = [step for step in range(600) if schedule.changes_after(step)]
    assert changes == list(range(begin, end, every))
    way = [schedule.progress(step) for step in range(600)]
    assert way == sorted(way)
    assert (way[begin], way[end]) == (0, 1)


@pytest.mark.parametrize(("begin", "end"), [(5, 5), (6, 5)])
def test_it_ends_after_its_beginning(begin, end):
    with pytest.raises(ValueError, match=r"draw_by, after 5 .*draw_after"):
        MaskSchedule(begin, 1, end)


@given(st.floats(0.01, 0.99), st.lists(st.floats(0, 1), min_size=2))
def test_the_ratio_rises(ratio, way):
    way.sort()
    ratios = [cubic_ratio(ratio, at) for at in way]
    assert ratios == sorted(ratios)
    assert all(0 <= each <= ratio for each in ratios)


def test_the_formula_of_the_paper():
    """Zhu & Gupta, equation 1, with an initial ratio of 0."""
    assert [cubic_ratio(0.8, n / 4) for n in range(5)] == pytest.approx(
        [0, 0.8 * (1 - 27 / 64), 0.8 * (1 - 1 / 8), 0.8 * (1 - 1 / 64), 0.8]
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def trained(model, make):
    optimizer = make(model.parameters())
    model(torch.randn(5, 6)).square().mean().backward()
    optimizer.step()
    return optimizer


def flat(model, tensors):
    return torch.cat([tensors[n].reshape(-1) for n, p in model.named_parameters() if p.dim() > 1])


def test_auto_is_saliency_where_the_optimizer_has_a_second_moment(model):
    adam = trained(model, torch.optim.Adam)
    rule = MaskRule(0.5).resolved(model, [adam])
    assert rule.score == "saliency"
    scores = {
        n: p.detach().abs() * adam.state[p]["exp_avg_sq"] ** 0.25
        for n, p in model.named_parameters()
    }
    masks = flat(model, rule.masks(model, [adam]))
    values = flat(model, scores)
    assert int(masks.sum()) == 40
    assert values[masks].min() >= values[~masks].max()
    assert MaskRule(0.5).resolved(model, [torch.optim.SGD(model.parameters(), 0.1)]) == MaskRule(
        0.5, "magnitude"
    )


def test_saliency_is_refused_with_the_reason_and_auto_does_without(model):
    sgd = trained(model, lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(ValueError, match=r"SGD does not estimate.*AdamW.*score='magnitude'"):
        MaskRule(0.5, "saliency").resolved(model, [sgd])
    model[0].weight.requires_grad_(False)
    adam = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"frozen: 0\.weight.*prune"):
        MaskRule(0.5, "saliency").resolved(model, [adam])
    assert MaskRule(0.5).resolved(model, [adam]).score == "magnitude"
    dense = MaskRule(0.5, "saliency", prune={"0.weight": False})
    assert dense.resolved(model, [adam]) == dense


def test_a_function_gets_the_weight_and_its_state(model):
    sgd = trained(model, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))

    def movement(weight, state):
        return -weight * state["momentum_buffer"]

    rule = MaskRule(0.75, movement).resolved(model, [sgd])
    assert rule.score_name == "movement"
    masks = flat(model, rule.masks(model, [sgd]))
    values = flat(model, {n: -p.detach() * p.grad for n, p in model.named_parameters()})
    assert int(masks.sum()) == 20
    assert values[masks].min() >= values[~masks].max()


def test_weights_that_were_not_trained_are_named(model):
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be scored"):
        MaskRule(0.5, "saliency").masks(model, [torch.optim.Adam(model.parameters())])


def test_nothing_to_prune_is_refused(model):
    with pytest.raises(ValueError, match="nothing to prune"):
        MaskRule(0.5, prune={"*": False}).sizes(model)


@pytest.mark.parametrize("score", ["saliency", "magnitude", lambda weight, state: -weight])
def test_weights_that_are_stored_sparse_lose_what_is_left(model, score):
    adam = trained(model, torch.optim.Adam)
    first = MaskRule(0.4, "magnitude").masks(model, [adam])
    masked = copy.deepcopy(model)
    sparsify(model, first, adam)
    rule = MaskRule(0.8, score, floor=0.1)
    seen = []
    prune = replace(rule, prune=lambda name, weight: seen.append(weight.dim()) or weight.dim() > 1)
    masks = prune.masks(model, [adam])
    assert set(seen) == {1, 2}
    assert sum(int(mask.sum()) for mask in masks.values()) == 16
    for name, mask in masks.items():
        assert mask.shape == masked.get_parameter(name).shape
        assert not (mask & ~first[name]).any()
    if score == "magnitude":
        with torch.no_grad():
            for name, mask in first.items():
                masked.get_parameter(name).mul_(mask)
        expected = rule.masks(masked)
        assert all(torch.equal(masks[name], expected[name]) for name in masks)
