from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse.pruning.scores import (
    Scores,
    Stored,
    has_second_moment,
    magnitude,
    saliency,
)


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


def test_each_is_computed_when_it_is_read():
    calls = []

    def score(weight, state):
        calls.append(state["name"])
        assert not weight.requires_grad
        return weight**2

    weights = {name: nn.Parameter(torch.full((2, 2), 3.0)) for name in "ab"}
    scores = Scores(score, list(weights), lambda name: Stored(weights[name], {"name": name}, None))
    assert list(scores) == ["a", "b"]
    assert calls == []
    assert torch.equal(scores["b"], torch.full((2, 2), 9.0))
    assert calls == ["b"]


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
        Scores(score, ["w"], lambda name: Stored(torch.ones(2, 3), {}, None))["w"]
