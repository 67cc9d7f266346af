"""What stages find of a step's changes makes up one list, the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lightning_axosparse.pipeline.dry_run import Found, StageChanges, StateCheck, agree
from lightning_axosparse.pipeline.state.batch_state import Changing, StateRules
from lightning_axosparse.pipeline.state.module_state import Place


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2)
        self.steps, self.best, self.kept = 0, 1e9, torch.zeros(2)


def stage_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None


STEPS, BEST, KEPT = (Place((), name) for name in ("steps", "best", "kept"))
IN_LAYER = Place(((".", "layers"), (".", "0")), "calls")
WEIGHT = Place(((".", "head"),), "weight")


def find(
    first: dict[int, StageChanges], again: dict[int, StageChanges], module: Any = None
) -> list[Found]:
    module = module or Module()
    trained = {id(parameter) for parameter in module.parameters()} - {id(module.teacher.weight)}
    check = StateCheck(module, trained, stage_of, [0.5, 0.5], 1e-4)
    return check.found(first, again)


def changes(place: Place, whole: Any, *parts: Any) -> StageChanges:
    return StageChanges({place: whole}, [{place: part} for part in parts])


def test_what_stages_find_of_their_own_counts() -> None:
    first = {
        0: StageChanges({STEPS: 1, IN_LAYER: 1}, [{STEPS: 1, IN_LAYER: 1}] * 2),
        1: StageChanges({STEPS: 2, IN_LAYER: 5}, [{STEPS: 2, IN_LAYER: 5}] * 2),
    }
    found = find(first, {})
    assert [(each.stage, each.place) for each in found] == [(0, STEPS), (0, IN_LAYER), (1, STEPS)]
    rules = StateRules([Changing(STEPS, "once"), Changing(IN_LAYER, "once")])
    assert agree(found, 1, is_whole=False) == (rules, [])


def test_what_only_a_stage_before_the_last_changes_is_put_back() -> None:
    found = find({0: changes(BEST, 1.0, 2.0, 3.0)}, {})
    rules, _ = agree(found, 1, is_whole=False)
    assert rules == StateRules([Changing(BEST, "once")])


def test_what_no_rule_explains_is_named() -> None:
    first, again = changes(BEST, 2.0, 1.0, 3.0), changes(BEST, 2.0, 1.0, 2.0)
    rules, (advice,) = agree(find({1: first}, {1: again}), 1, is_whole=False)
    assert rules == StateRules([Changing(BEST, None)])
    assert "`self.best` from 1e+09 to 2 with the whole batch" in advice
    assert "change it to 1, 3" in advice


def test_what_is_written_though_it_is_equal_changes() -> None:
    (found,) = find({1: StageChanges({}, [{}, {}], {KEPT})}, {})
    assert (found.place, found.rule) == (KEPT, "once")


def test_a_trained_parameter_may_be_put_in_order_but_not_moved() -> None:
    module = Module()
    weight = module.head.weight.detach().clone()
    masked, moved = weight.triu(), weight + 1
    again = changes(WEIGHT, masked, masked, masked)
    found = find({1: changes(WEIGHT, masked, masked, masked)}, {1: again}, module)
    assert agree(found, 1, is_whole=True) == (StateRules([]), [])
    again = changes(WEIGHT, moved + 1, moved + 1, moved + 1)
    found = find({1: changes(WEIGHT, moved, moved, moved)}, {1: again}, module)
    rules, (advice,) = agree(found, 1, is_whole=True)
    assert rules == StateRules([])
    assert "`self.head.weight`, which is trained" in advice
    found = find({1: changes(WEIGHT, moved, moved)}, {}, module)
    # Once a batch, without micro-batches.
    assert agree(found, 1, is_whole=True) == (StateRules([]), [])


def test_a_parameter_that_no_optimizer_trains_is_put_back() -> None:
    module = Module()
    place = Place(((".", "teacher"),), "weight")
    moved = module.teacher.weight.detach() + 1
    again = changes(place, moved, moved, moved)
    found = find({1: changes(place, moved, moved, moved)}, {1: again}, module)
    assert agree(found, 1, is_whole=True) == (StateRules([Changing(place, "once")]), [])


def test_what_is_too_large_is_sent_nowhere() -> None:
    large = torch.ones(300_000)
    seen = changes(KEPT, large, large, large)
    found = find({0: seen, 1: seen}, {})
    rules, (advice,) = agree(found, 1, is_whole=False)
    assert rules == StateRules([Changing(KEPT, "once", False)])
    assert "larger than 1 MB" in advice
    assert agree(found, 1, is_whole=True) == (rules, [])


def test_what_says_that_hooks_are_registered_is_left_as_it_is() -> None:
    hooks = {Place(((".", "head"),), "_forward_hooks"): {1: print}}
    runs = {STEPS: 1, BEST: 2.0}, [{STEPS: 1, BEST: 2.0}, {STEPS: 1, BEST: 3.0}]
    again = {0: StageChanges(*runs)}
    first = {0: StageChanges(runs[0] | hooks, runs[1])}
    best = Changing(BEST, None)
    rules, (advice,) = agree(find(first, again), 0, is_whole=True)
    assert rules == StateRules([best], frozenset({STEPS}))
    assert "`self.best`" in advice
    rules, _ = agree(find(again, again), 0, is_whole=True)
    assert rules == StateRules([Changing(STEPS, "once"), best])
