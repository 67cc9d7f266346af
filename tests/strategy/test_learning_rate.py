from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_axosparse.strategy.learning_rate import scaled_rates


@pytest.fixture
def optimizer():
    one, two = (nn.Parameter(torch.ones(2)) for _ in range(2))
    return torch.optim.SGD([{"params": [one], "lr": 0.1}, {"params": [two], "lr": 0.5}])


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def test_all_rates_are_scaled_inside_and_the_same_again_outside(optimizer):
    with scaled_rates(optimizer, 3.0):
        assert rates(optimizer) == pytest.approx([0.3, 1.5])
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
    assert rates(optimizer) == [0.1, 0.5]
    first, second = (group["params"][0] for group in optimizer.param_groups)
    assert torch.allclose(first, torch.full((2,), 0.7))
    assert torch.allclose(second, torch.full((2,), -0.5))


def test_a_tensor_stays_the_same_object(optimizer):
    rate = torch.tensor(0.25)
    optimizer.param_groups[0]["lr"] = rate
    with scaled_rates(optimizer, 2.0):
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.25


def test_a_rate_that_is_set_inside_stays(optimizer):
    with scaled_rates(optimizer, 2.0):
        optimizer.param_groups[1]["lr"] = 7.0
    assert rates(optimizer) == [0.1, 7.0]


def test_rates_come_back_after_an_error(optimizer):
    with pytest.raises(ArithmeticError), scaled_rates(optimizer, 2.0):
        raise ArithmeticError
    assert rates(optimizer) == [0.1, 0.5]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 8),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1),
                torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
            ],
            [3],
        ),
    ],
)
def test_schedulers_set_the_rates_that_they_would_set_anyway(make):
    def scheduled(factor):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        scheduler, seen = make(optimizer), []
        for _ in range(8):
            with scaled_rates(optimizer, factor):
                optimizer.step()
            seen.append(scheduler.get_last_lr())
            scheduler.step()
        return seen

    assert scheduled(5.0) == scheduled(1.0)
