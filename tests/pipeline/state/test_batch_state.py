"""Micro-batches on copies of a module's state leave what one batch would."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.state.batch_state import BatchState, Changing, Sent, StateRules
from lightning_axosparse.pipeline.state.module_state import Place
from lightning_axosparse.pipeline.state.rules import Entries, Grown

PARTS = [MicroBatch(None, 3, 0.75, 0), MicroBatch(None, 1, 0.25, 1)]


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layer.calls = 0
        self.register_buffer("average", torch.zeros(2))
        self.steps, self.size, self.items = 0, 0, [1]
        self.late = 5


def place(name: str) -> Place:
    *owner, name = name.split(".")
    return Place(tuple((".", each) for each in owner), name)


GROWN = Grown(Entries({}, "sum"))
CHANGING = [
    Changing(place("steps"), "once"),
    Changing(place("average"), "mean"),
    Changing(place("items"), GROWN),
    Changing(place("layer.calls"), "once"),
    Changing(place("made"), None),
]


def stage_of(name: str) -> int | None:
    return 0 if name.startswith("layer.") else None


def batch_state(module: nn.Module, stages: range, sends: bool = False) -> BatchState:
    return BatchState(module, stages, 1, stage_of, sends, torch.device("cpu"))


def run(module: Any, state: BatchState, stages: Sequence[int], parts: Any = PARTS) -> None:
    """What the step reads before the layer counts on every stage, but changes on the last."""
    for part in parts:
        for stage in stages:
            state.begin(stage)
            module.steps += 1
            if stage == 0:
                module.layer.calls += 1
            assert module.steps - 1 in (0, 10)
            if stage == 1:
                module.average += part.size
                module.items.append(part.size)
                module.made = part.size
                module.late += 1
            state.end(stage)


def values(module: Any) -> list[Any]:
    made = getattr(module, "made", None)
    return [module.steps, module.average.tolist(), module.items, module.late, made]


def test_all_stages_in_one_process() -> None:
    module = Module()
    average, items = module.average, module.items
    state = batch_state(module, range(2))
    state.begin_batch(StateRules(CHANGING), PARTS)
    run(module, state, range(2))
    assert values(module)[:4] == [0, [0.0, 0.0], [1], 5]
    sent, warnings = state.made_shared()
    assert warnings == []
    names = {each.place.name for each in sent}
    assert names == {"steps", "average", "items", "made", "late", "calls"}
    assert state.settle(sent) == []
    assert values(module) == [1, [2.5, 2.5], [1, 4], 6, 1]
    assert module.layer.calls == 1
    assert module.average is average
    assert module.items is items
    assert average._version == 0


def test_other_stages_get_what_the_last_one_changes() -> None:
    first, last = Module(), Module()
    states = [batch_state(first, range(1), True), batch_state(last, range(1, 2), True)]
    for batch in range(2):
        for stage, (module, state) in enumerate(zip((first, last), states, strict=True)):
            module.steps, module.layer.calls = 10 * batch, 7
            state.begin_batch(StateRules(CHANGING), PARTS)
            run(module, state, [stage])
        sent, _ = states[1].made_shared()
        for state in states:
            assert state.settle(sent) == []
        assert values(first) == values(last)
    assert values(last) == [11, [5.0, 5.0], [1, 4, 4], 7, 1]
    assert (first.layer.calls, last.layer.calls) == (8, 7)


def test_replicas_that_share_a_batch_join_their_parts() -> None:
    modules = Module(), Module()
    states = [batch_state(module, range(2), True) for module in modules]
    for module, state, part in zip(modules, states, PARTS, strict=True):
        state.begin_batch(StateRules(CHANGING), [part])
        run(module, state, range(2), [part])
    states[0].join([state.recorded() for state in states], [part.weight for part in PARTS])
    sent, _ = states[0].made_shared()
    for state in states:
        state.settle(sent)
    assert [values(module)[:3] for module in modules] == [[1, [2.5, 2.5], [1, 4]]] * 2


def test_a_lent_parameter_keeps_what_is_known_of_it() -> None:
    module = nn.Linear(2, 2)
    own, whole = module.weight, torch.Size([4, 2])
    vars(own)["whole_shape"] = whole  # Of that, this rank has a part.
    state = batch_state(module, range(2))
    state.begin_batch(StateRules([Changing(place("weight"), "mean")]), PARTS)
    state.begin(0)
    assert module.weight is not own
    assert vars(module.weight) == {"whole_shape": whole}
    state.end(0)
    assert module.weight is own


def test_what_is_too_large_stays_where_it_is() -> None:
    module = Module()
    state = batch_state(module, range(1, 2), True)
    state.begin_batch(StateRules([Changing(place("average"), "mean")]), PARTS)
    for _ in PARTS:
        state.begin(1)
        module.average = torch.zeros(300_000)
        state.end(1)
    sent, (warning,) = state.made_shared()
    assert sent == []
    assert "`self.average`" in warning
    state.settle(sent)
    assert len(module.average) == 300_000


@pytest.mark.parametrize(
    ("parts", "expected", "warned"),
    [((6, 6), 6, False), ((8, 6), 6, True), ((5.5, 7.5), 7.5, True)],
)
def test_a_number_that_changes_later(parts: Any, expected: float, warned: bool) -> None:
    module = Module()
    state = batch_state(module, range(2))
    state.begin_batch(StateRules(), PARTS)
    for value in parts:
        for stage in range(2):
            state.begin(stage)
            assert module.late == 5
            module.late = value
            state.end(stage)
    sent, warnings = state.made_shared()
    state.settle(sent)
    assert module.late == expected
    assert [warning.startswith("The step changes `self.late`") for warning in warnings] == (
        [True] if warned else []
    )


def test_a_rule_that_no_longer_holds_is_named() -> None:
    module = Module()
    state = batch_state(module, range(2))
    state.begin_batch(StateRules(CHANGING[:2]), PARTS)
    for part in PARTS:
        for stage in range(2):
            state.begin(stage)
            module.steps, module.average = part.size, torch.zeros(part.size)
            state.end(stage)
    sent, warnings = state.made_shared()
    assert ["`self.steps`" in warnings[0], "`self.average`" in warnings[1]] == [True, True]
    assert state.settle(sent) == []
    assert (module.steps, module.average.shape) == (1, (1,))


def test_a_layer_that_is_computed_again_reads_what_it_has_read() -> None:
    module = Module()
    state = batch_state(module, range(2))
    state.begin_batch(StateRules(CHANGING), PARTS)
    state.begin(0)
    module.layer.calls = 3  # by a hook
    remembered = state.remember(module.layer)
    module.layer.calls += 1
    state.end(0)
    with remembered():
        assert module.layer.calls == 3
        module.layer.calls += 1
    assert module.layer.calls == 0


def test_a_list_that_no_longer_grows_is_named() -> None:
    first, last = Module(), Module()
    states = [batch_state(first, range(1), True), batch_state(last, range(1, 2), True)]
    for state in states:
        state.begin_batch(StateRules([Changing(place("items"), GROWN)]), PARTS)
    for part in PARTS:
        states[1].begin(1)
        last.items = [part.size]
        states[1].end(1)
    sent, (warning,) = states[1].made_shared()
    assert sent == [Sent(place("items"), "replace", [1])]
    assert "`self.items` in other ways than in its first batch" in warning
    states[0].settle(sent)
    assert first.items == [1]


def test_a_full_window_goes_on() -> None:
    module = Module()
    module.items = deque([7, 8, 9], maxlen=3)
    state = batch_state(module, range(2))
    for first in range(2):
        state.begin_batch(StateRules([Changing(place("items"), GROWN)]), PARTS)
        for part in PARTS:
            for stage in range(2):
                state.begin(stage)
                if stage == 1:
                    module.items.append(part.size)
                    assert len(module.items) == 3
                state.end(stage)
        sent, _ = state.made_shared()
        state.settle(sent)
        assert module.items == deque([[8, 9, 4], [9, 4, 4]][first], maxlen=3)
        assert module.items.maxlen == 3
