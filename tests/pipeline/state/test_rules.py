"""Each rule is found where a step follows it, and combines what one process would have."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_axosparse.pipeline.state.rules import (
    Entries,
    Grown,
    Joined,
    Rule,
    Seen,
    Unexplained,
    combine,
    find,
)
from lightning_axosparse.pipeline.state.values import MISSING, same

SAMPLES = torch.tensor([0.5, 3.0, -1.0, 2.0, 0.25, 7.0, 1.0])
PARTS = [SAMPLES[:3], SAMPLES[3:6], SAMPLES[6:]]
WEIGHTS = [3 / 7, 3 / 7, 1 / 7]
Step = Callable[[Any, Tensor], Any]


def run(step: Step, before: Any, part: Tensor) -> Any:
    return step(copy.deepcopy(before), part)


def seen(step: Step, before: Any, again: bool = True) -> Seen:
    whole = run(step, before, SAMPLES)
    parts = [run(step, before, part) for part in PARTS]
    second = seen(step, whole, again=False) if again else None
    return Seen(before, whole, parts, WEIGHTS, 1e-4, second)


def added(counter: Any, x: Tensor) -> Any:
    counter.update(["large" if value > 1 else "small" for value in x.tolist()])
    return counter


def pushed(items: Any, *new: Any) -> Any:
    items.extend(new)
    return items


def meter(held: Any, x: Tensor) -> Any:
    return {**held, "sum": held["sum"] + float(x.sum()), "seen": held["seen"] + len(x)}


def replaced(held: Any, x: Tensor) -> Any:
    return SimpleNamespace(outputs=x, mean=float(x.mean()))


EXPLAINED: dict[str, tuple[Step, Any, Rule | type]] = {
    "a counter": (lambda n, x: n + 1, 3, "once"),
    "a counter in a tensor": (lambda n, x: n + 1, torch.tensor(3), "once"),
    "a flag": (lambda flag, x: True, False, "once"),
    "a first time": (lambda n, x: 1 if n is MISSING else n + 1, MISSING, "once"),
    "a function": (lambda f, x: lambda: 0, None, "once"),
    "samples": (lambda n, x: n + len(x), 0, "sum"),
    "samples, at first": (lambda n, x: len(x) + (0 if n is MISSING else n), MISSING, "sum"),
    "a sum": (lambda s, x: s + x.sum(), torch.tensor(5.0), "sum"),
    "an array": (lambda a, x: a + x.numpy().sum() * np.ones(2), np.zeros(2), "sum"),
    "a moving average": (lambda a, x: 0.9 * a + 0.1 * x.mean(), torch.tensor(1.0), "mean"),
    "the last mean": (lambda a, x: float(x.mean()), 0.0, "mean"),
    "the last mean, at first": (lambda a, x: x.mean(), None, "mean"),
    "the last outputs": (lambda a, x: x[None] * 2, MISSING, Joined(1)),
    "a set": (lambda s, x: s | set(x.tolist()), {9.0}, "sum"),
    "a list of outputs": (lambda xs, x: pushed(xs, x), [], Grown),
    "a list of losses": (lambda xs, x: pushed(xs, x.mean(), len(x)), [1], Grown),
    "a list of samples": (lambda xs, x: pushed(xs, *x.tolist()), [0.0], Grown(Joined(0))),
    "the last samples": (lambda xs, x: x.tolist(), [0.0], Joined(0)),
    "a window": (lambda d, x: pushed(d, float(x.mean())), deque([1.0, 2.0], 2), Grown),
    "counts": (added, Counter(large=3), Entries),
    "first counts": (added, Counter(), Entries),
    "sums": (meter, {"sum": 1.0, "seen": 4}, Entries),
    "totals": (lambda t, x: [t[0] + len(x), t[1]], [0, 0], Entries),
    "an object": (replaced, None, Entries),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_rule_is_found_and_combines_the_batch(name: str) -> None:
    step, before, expected = EXPLAINED[name]
    rule = find(seen(step, before))
    assert isinstance(rule, expected) if isinstance(expected, type) else rule == expected
    value = before
    for _ in range(3):  # in batch after batch
        whole = run(step, value, SAMPLES)
        parts = [run(step, value, part) for part in PARTS]
        combined = combine(rule, value, parts, WEIGHTS)
        assert type(combined) is type(whole)
        if not callable(whole):
            torch.testing.assert_close(plain(combined), plain(whole))
        value = whole
    alone = run(step, value, SAMPLES)
    assert same(combine(rule, value, [alone], [1.0]), alone)


def plain(value: Any) -> Any:
    """In types that can be compared with a tolerance."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if isinstance(value, dict):
        return dict(sorted(value.items()))
    return sorted(value) if isinstance(value, (set, deque)) else value


UNEXPLAINED: dict[str, tuple[Step, Any, str]] = {
    "a running minimum": (lambda best, x: min(best, float(x.mean())), 1e9, ""),
    "a maximum": (lambda best, x: torch.maximum(best, x.max()), torch.tensor(0.0), ""),
    "a variance": (lambda v, x: x.var(correction=0), torch.tensor(0.0), ""),
    "the last size": (lambda n, x: len(x), 0, ""),
    "a text": (lambda t, x: str(x.tolist()), "", ""),
    "an entry": (
        lambda d, x: {"n": d["n"] + 1, "max": float(x.max())},
        {"n": 0, "max": 0.0},
        "['max']",
    ),
    "an item": (lambda xs, x: pushed(xs, float(x.max())), [], "[...]"),
    "other entries": (lambda d, x: {len(x): 1}, {}, ""),
    "a median": (lambda m, x: float(x.median()), MISSING, ""),
    "a type": (lambda m, x: len(x) if len(x) > 3 else None, MISSING, ""),
}


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_what_no_rule_explains_is_named(name: str) -> None:
    step, before, path = UNEXPLAINED[name]
    with pytest.raises(Unexplained) as caught:
        find(seen(step, before))
    assert caught.value.path == path


def test_a_second_run_tells_rules_from_chance() -> None:
    step, before, _ = UNEXPLAINED["a running minimum"]
    assert find(seen(step, before, again=False)) == "mean"
    with pytest.raises(Unexplained):
        find(seen(step, before))


def test_what_a_later_batch_appends_otherwise_is_kept() -> None:
    rule = find(seen(lambda xs, x: pushed(xs, x), []))
    assert combine(rule, [1], [[1], [1]], [0.5, 0.5]) == [1]
    assert combine(rule, [1], [[1, 2], [1]], [0.5, 0.5]) == [1, 2]
    with pytest.raises(ValueError):
        combine(rule, [1], [[2], [1]], [0.5, 0.5])


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=9), st.integers(-99, 99), st.data())
def test_counts_add_up(values: list[int], before: int, data: Any) -> None:
    cut = data.draw(st.integers(1, len(values) - 1))
    parts = values[:cut], values[cut:]

    whole, again = before + sum(values), before + 2 * sum(values)
    each = [before + sum(part) for part in parts]
    weights = [len(part) / len(values) for part in parts]
    second = Seen(whole, again, [whole + sum(part) for part in parts], weights, 1e-4)
    rule = find(Seen(before, whole, each, weights, 1e-4, second))
    assert combine(rule, before, each, weights) == whole
    if all(sum(part) for part in parts):
        assert rule == "sum"
