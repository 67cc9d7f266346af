from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse.pruning.rewind import EarlierWeights


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.NAdam(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Rprop(p, 0.1),
    ],
)
def test_training_repeats_itself_from_the_earlier_step_with_a_new_optimizer(make):
    torch.manual_seed(0)
    inputs = torch.randn(6, 5, 4)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    earlier = EarlierWeights()
    assert not earlier.taken

    def train(optimizer):
        for x in inputs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    train(optimizer)
    earlier.take(dict(model.named_parameters()))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    train(optimizer)
    assert not torch.equal(model.weight, start["weight"])
    again = EarlierWeights()
    again.load_state(earlier.gather_state({"weight", "bias"}, None))
    again.keep_only({"weight", "bias"})
    again.restore(dict(model.named_parameters()), [optimizer])
    assert not again.taken
    first = train(optimizer)
    model.load_state_dict(start)
    second = train(make(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_rank_saves_what_it_counts_and_keeps_what_it_holds():
    earlier = EarlierWeights()
    earlier.take({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.zeros(2))})
    assert list(earlier.gather_state({"b"}, None)) == ["b"]
    earlier.keep_only({"a"})
    assert list(earlier.gather_state({"a", "b"}, None)) == ["a"]
