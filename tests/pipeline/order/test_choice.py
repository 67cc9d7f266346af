"""The fastest schedule is found by trials, and is the same on all ranks."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_axosparse.pipeline.order import choice as schedule_choice
from lightning_axosparse.pipeline.order.choice import ScheduleChoice, ScheduleRule, Trials
from lightning_axosparse.pipeline.order.schedule import (
    BubbleFilling,
    CooldownFilling,
    MessageDriven,
    OneForwardOneBackward,
    Schedule,
    ZeroBubbleH1,
)

TRIALS = 24
WAYS = {"together": MessageDriven, "cooldown": CooldownFilling, "deferred": BubbleFilling}
IN_TURN = [BubbleFilling, CooldownFilling, MessageDriven]


class Clock:
    """Passes take as long as their schedule is said to."""

    def __init__(self, together: float, cooldown: float, deferred: float) -> None:
        self.now = 0.0
        self._seconds = dict(zip(WAYS.values(), (together, cooldown, deferred), strict=True))

    def run(self, schedule: type[Schedule]) -> None:
        self.now += self._seconds[schedule]


def run(choice: ScheduleChoice, clock: Clock, monkeypatch: Any) -> Any:
    """Run batches; yields their schedules."""
    monkeypatch.setattr(schedule_choice, "perf_counter", lambda: clock.now)
    while True:
        schedule = choice.begin_batch()
        with choice.timed():
            clock.run(schedule)
        yield schedule


def alone(trials: Trials) -> list[Trials]:
    return [trials]


@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ((1.0, 1.0, 0.9), BubbleFilling),
        ((1.0, 0.8, 0.9), CooldownFilling),
        ((0.9, 1.0, 1.0), MessageDriven),
        ((1.0, 1.0, 1.0), MessageDriven),
    ],
)
def test_the_fastest_one_is_kept(seconds: Any, fastest: Any, monkeypatch: Any) -> None:
    choice = ScheduleChoice(WAYS, alone)
    schedules = list(islice(run(choice, Clock(*seconds), monkeypatch), 40))
    assert schedules[:TRIALS] == IN_TURN * (TRIALS // 3)
    assert set(schedules[TRIALS:]) == {fastest}


def test_the_slowest_rank_decides_for_all(monkeypatch: Any) -> None:
    slow = Trials((3.0, 4.0, 4.0), reordered=False)
    gathered = []

    def gather(trials: Trials) -> list[Trials]:
        gathered.append(trials)
        return [trials, slow]

    choice = ScheduleChoice(WAYS, gather)
    *_, last = islice(run(choice, Clock(2.0, 1.5, 1.0), monkeypatch), 40)
    assert last is MessageDriven
    assert gathered == [((2.0, 1.5, 1.0), False)]


def test_a_rank_that_sums_in_another_order_decides_for_all(monkeypatch: Any) -> None:
    reordered = Trials((1.0, 0.5, 0.5), reordered=True)
    choice = ScheduleChoice(WAYS, lambda mine: [mine, reordered])
    *_, last = islice(run(choice, Clock(1.0, 0.7, 0.5), monkeypatch), 40)
    assert last is MessageDriven


def test_reordering_is_told_to_the_other_ranks(monkeypatch: Any) -> None:
    gathered = []
    choice = ScheduleChoice(WAYS, lambda mine: gathered.append(mine) or [mine])
    running = run(choice, Clock(1.0, 0.7, 0.5), monkeypatch)
    next(running)
    choice.found_reordered_sums()
    *_, last = islice(running, 40)
    assert gathered[0].reordered
    assert last is MessageDriven


def test_it_is_measured_again_when_passes_have_changed(monkeypatch: Any) -> None:
    choice = ScheduleChoice(WAYS, alone)
    *_, before = islice(run(choice, Clock(1.0, 0.7, 0.5), monkeypatch), 40)
    choice.measure_again()
    schedules = list(islice(run(choice, Clock(1.0, 2.0, 2.0), monkeypatch), 40))
    assert before is BubbleFilling
    assert schedules[:3] == IN_TURN
    assert schedules[-1] is MessageDriven


@pytest.mark.parametrize(
    ("schedule", "weight_gradients", "may_defer", "stages", "expected"),
    [
        ("message-driven", "deferred", False, 1, BubbleFilling),
        ("message-driven", "cooldown", False, 4, CooldownFilling),
        ("message-driven", "together", True, 4, MessageDriven),
        ("message-driven", None, False, 4, MessageDriven),
        ("message-driven", None, True, 1, MessageDriven),
        ("1f1b", None, True, 4, OneForwardOneBackward),
        ("zb-h1", None, True, 4, ZeroBubbleH1),
    ],
)
def test_what_is_given_or_cannot_be_deferred_is_not_tried(
    schedule: str, weight_gradients: Any, may_defer: bool, stages: int, expected: Any
) -> None:
    rule = ScheduleRule(schedule, weight_gradients, may_defer)
    groups: Any = SimpleNamespace(world=None)  # asked by none of them
    choice = rule.choice(stages, groups)
    chosen = []
    for _ in range(TRIALS + 2):
        chosen.append(choice.begin_batch())
        with choice.timed():
            pass
    assert set(chosen) == {expected}
