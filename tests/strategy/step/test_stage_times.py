"""What stages that compute unequally long are told."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.step import stage_times
from lightning_axosparse.strategy.step.stage_times import StageTimes
from lightning_axosparse.support.trace import clock, now
from tests.parity.cases import CLASSES, FEATURES, Net, loader, trainer


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (0.009, []),
        (0.002, ["Stage 0 computes 1.7 times as long as the mean stage", "10, 2 ms", "'time'"]),
        (0.05, ["Stage 1 computes 1.7 times as long", "10, 50 ms"]),
    ],
)
def test_the_batches_after_the_first_are_compared_once(
    other: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(stage_times, "rank_zero_info", told.append)
    monkeypatch.setattr(stage_times, "all_gather", lambda own, group: [own, other])
    group: Any = object()
    times = StageTimes(group)
    for batch in range(9):
        with times.batch():
            seconds = 7.0 if batch == 0 else 0.01  # The first batch compiles and allocates.
            clock.add("forward", now(), now() + seconds / 2)
            clock.add("backward", now(), now() + seconds / 2)
            clock.add("wait", now(), now() + 3.0)
    assert len(told) == bool(said)
    assert all(words in text for text in told for words in said)


def test_a_single_stage_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times, "all_gather", None)
    times = StageTimes(None)
    for _ in range(9):
        with times.batch():
            clock.add("forward", now(), now() + 1.0)


class Sleeps(nn.Linear):
    """A layer of few parameters that takes long."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return super().forward(x)


class Unequal(Net):
    """As a ResNet, whose first layers have few parameters and most of the work."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Sleeps(FEATURES, 4), nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, CLASSES)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("balance", "lines"), [("parameters", 1), ([1, 3], 0)])
def test_a_run_says_which_stage_computes_longest(
    balance: Any, lines: int, warm_ranks: None, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    strategy = AxoSparseStrategy(g_inter=2, balance=balance)
    trainer(strategy, 2, callbacks=[]).fit(Unequal(), loader(1))
    said = "".join(capfd.readouterr())
    assert len(re.findall("^Stage 0 computes [^ ]+ times as long", said, re.MULTILINE)) == lines
