from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from lightning_axosparse.pruning.rule import (
    MaskRule,
    MaskSchedule,
    Stored,
    cubic_ratio,
    has_second_moment,
    magnitude,
    saliency,
    scores_of,
)
from lightning_axosparse.sparse import sparsify

steps = st.integers(1, 500)


@given(steps, steps, steps)
def test_masks_change_from_its_start_to_before_its_end(start, every, end):
    assume(start < end)
    schedule = MaskSchedule(start, every, end)
    changes = [step for step in range(600) if schedule.changes_after(step)]
    assert changes == list(range(start, end, every))
    way = [schedule.progress(step) for step in range(600)]
    assert way == sorted(way)
    assert (way[start], way[end]) == (0, 1)


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5)])
def test_it_ends_after_its_start(start, end):
    with pytest.raises(ValueError, match=r"end, after 5 .*start, after"):
        MaskSchedule(start, 1, end)


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
    with pytest.raises(ValueError, match=r"frozen: 0\.weight.*which"):
        MaskRule(0.5, "saliency").resolved(model, [adam])
    assert MaskRule(0.5).resolved(model, [adam]).score == "magnitude"
    dense = MaskRule(0.5, "saliency", which={"0.weight": False})
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


def test_a_weight_that_is_frozen_later_keeps_its_score(model):
    adam = trained(model, torch.optim.Adam)
    rule = MaskRule(0.5).resolved(model, [adam])
    expected = flat(model, rule.masks(model, [adam]))
    model[0].requires_grad_(False)
    assert torch.equal(flat(model, rule.masks(model, [adam])), expected)


def test_weights_that_were_not_trained_are_named(model):
    with pytest.raises(ValueError, match=r"'0\.weight' cannot be scored"):
        MaskRule(0.5, "saliency").masks(model, [torch.optim.Adam(model.parameters())])


def test_nothing_to_prune_is_refused(model):
    with pytest.raises(ValueError, match="nothing to prune"):
        MaskRule(0.5, which={"*": False}).sizes(model)


@pytest.mark.parametrize("score", ["saliency", "magnitude", lambda weight, state: -weight])
def test_weights_that_are_stored_sparse_lose_what_is_left(model, score):
    adam = trained(model, torch.optim.Adam)
    first = MaskRule(0.4, "magnitude").masks(model, [adam])
    masked = copy.deepcopy(model)
    sparsify(model, first, adam)
    rule = MaskRule(0.8, score, floor=0.1)
    seen = []
    prune = replace(rule, which=lambda name, weight: seen.append(weight.dim()) or weight.dim() > 1)
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


def stepped(make):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4))
    optimizer = make([weight])
    gradient = torch.randn(3, 4)
    weight.grad = gradient.clone()
    optimizer.step()
    return weight, optimizer.state[weight], gradient


WITH = [
    lambda p: torch.optim.AdamW(p, 1e-3, amsgrad=True),
    lambda p: torch.optim.Adam(p, 1e-3, foreach=True),
    lambda p: torch.optim.NAdam(p, 1e-3),
    lambda p: torch.optim.RAdam(p, 1e-3),
    lambda p: torch.optim.RMSprop(p, 1e-3),
    lambda p: torch.optim.Adadelta(p, 1e-3),
    lambda p: torch.optim.Adagrad(p, 1e-3),
]
WITHOUT = [
    lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
    lambda p: torch.optim.Adamax(p, 1e-3),
    lambda p: torch.optim.LBFGS(p, 1e-3),
    lambda p: torch.optim.Rprop(p, 1e-3),
]


@pytest.mark.parametrize("make", WITH)
def test_saliency_is_magnitude_times_the_fourth_root_of_the_squared_gradient(make):
    weight, state, gradient = stepped(make)
    scores = saliency(weight.detach(), state)
    ratio = scores / (weight * gradient.abs().sqrt()).detach().abs()
    assert torch.allclose(ratio, ratio[0, 0], rtol=1e-4)  # after one step, up to a factor
    assert has_second_moment(make([nn.Parameter(torch.ones(2, 3))]))


@pytest.mark.parametrize("make", WITHOUT)
def test_optimizers_without_a_second_moment_are_known(make):
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = make([weight])
    assert not has_second_moment(optimizer)
    assert not optimizer.state
    assert torch.equal(weight, torch.ones(2, 3))


def test_a_second_moment_is_needed_for_every_entry():
    for state in ({}, {"exp_avg_sq": torch.ones(3)}, {"momentum_buffer": torch.ones(3, 4)}):
        with pytest.raises(ValueError, match="no second moment"):
            saliency(torch.ones(3, 4), state)


def test_scores_of_16_bits_are_computed_in_32():
    weight = torch.tensor([[1e-4, 2e-4]], dtype=torch.float16)
    state = {"exp_avg_sq": torch.tensor([[6e-8, 6e-8]], dtype=torch.float16)}
    one, two = saliency(weight, state)[0]
    assert one.dtype == torch.float32
    assert 0 < one < two
    assert magnitude(-weight, {}).dtype == torch.float16


def test_they_are_computed_without_a_graph():
    def score(weight, state):
        assert not weight.requires_grad
        assert state == {"name": "b"}
        return weight**2

    weight = nn.Parameter(torch.full((2, 2), 3.0))
    found = scores_of(score, "b", Stored(weight, {"name": "b"}, None))
    assert torch.equal(found, torch.full((2, 2), 9.0))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda weight, state: weight.sum(), r"returned \(\) for the weight 'w'.*\(2, 3\)"),
        (lambda weight, state: 0.5, "returned float for the weight 'w'"),
        (saliency, "'w' cannot be scored: it has no second moment.*score='magnitude'"),
    ],
)
def test_what_is_no_score_is_refused_by_name(score, message):
    with pytest.raises(ValueError, match=message):
        scores_of(score, "w", Stored(torch.ones(2, 3), {}, None))
