"""Finds how the values that micro-batches leave in an attribute make up that of the whole batch.

Every micro-batch begins with what the attribute was before the batch. A rule says what the batch
ends with, given what each micro-batch has made of it:

    once        what each of them made of it, as all made the same (`self.steps += 1`)
    sum         what it was, and the sum of the changes (`self.samples += len(x)`)
    mean        the weighted mean (`self.average = 0.9 * self.average + 0.1 * x.mean()`)
    total       the sum of the values (`self.size = len(x)`)
    union       of sets (`self.seen.update(labels)`)
    Joined      the values one after the other (`self.last = logits`)
    Appended    what it was, and the items that they have appended to it, one after the other
    Items       the same, where all append as many: each item has a rule of its own
    Entries     each entry of a collection, or attribute of an object, has a rule of its own

What the whole batch has made of the attribute shows which rule holds. That may be chance: a running
minimum of a loss looks like a mean in the first batch. So the batch and its micro-batches are run a
second time, from what the whole batch has left, and the rule has to hold there, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.pipeline.batch.layout import Key
from lightning_axosparse.pipeline.state.values import (
    MISSING,
    entries,
    is_object,
    same,
    with_entries,
)


@dataclass(frozen=True)
class Joined:
    """Tensors or arrays are concatenated along a dimension."""

    dim: int


@dataclass(frozen=True)
class Appended:
    """The items that micro-batches have appended stand one after the other."""


@dataclass(frozen=True)
class Items:
    """Each item that a batch appends is made of one item of each micro-batch, by its rule."""

    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Entries:
    """Each entry of a collection has its rule, and the others, which may be new, a common one."""

    rules: Mapping[Key, Rule]
    others: Rule

    def of(self, key: Key) -> Rule:
        """The rule of an entry."""
        return self.rules.get(key, self.others)


Rule: TypeAlias = (
    Literal["once", "sum", "mean", "total", "union"] | Joined | Appended | Items | Entries
)


class Seen(NamedTuple):
    """What runs have made of an attribute, or of an entry of it.

    Attributes:
        before: what it was.
        whole: what the whole batch made of it.
        parts: what each micro-batch made of it, beginning with ``before``.
        weights: of the micro-batches in the batch.
        tolerance: largest relative error of a change.
        again: what the second runs have made of it; None if there were none.
    """

    before: Any
    whole: Any
    parts: Sequence[Any]
    weights: Sequence[float]
    tolerance: float
    again: Seen | None = None


class Unexplained(Exception):
    """No rule says how micro-batches make up the whole batch.

    Attributes:
        path: of the entry, after the attribute.
        seen: what the runs have made of it.
    """

    def __init__(self, path: str, seen: Seen) -> None:
        super().__init__(path)
        self.path, self.seen = path, seen


def find(seen: Seen, path: str = "") -> Rule:
    """The rule by which micro-batches make up the batch.

    Raises:
        Unexplained: if there is none.
    """
    for rule in _candidates(seen, path):
        if isinstance(rule, (Entries, Items)):
            return rule
        if _holds(rule, seen):
            return rule
    raise Unexplained(path, seen)


def combine(rule: Rule, before: Any, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """What the batch ends with.

    Args:
        rule: of the attribute.
        before: what it was.
        parts: what each micro-batch has made of it.
        weights: of the micro-batches, which add up to one.
    """
    if len(parts) == 1 and not isinstance(rule, (Items, Appended)):
        return parts[0]
    if isinstance(rule, Joined):
        return _joined(parts, rule.dim)
    if isinstance(rule, (Appended, Items)):
        if any(items_after(before, part) is None for part in parts):
            before = type(parts[0])()  # The list was replaced.
        return extended(before, appended(rule, before, parts, weights))
    if isinstance(rule, Entries):
        return _combined_entries(rule, before, parts, weights)
    return _COMBINE[rule](before, parts, weights)


def appended(rule: Rule, before: Any, parts: Sequence[Any], weights: Sequence[float]) -> list[Any]:
    """The items that the batch appends to a list, by ``Items`` or ``Appended``."""
    each = [items_after(before, part) or [] for part in parts]
    counts = {len(items) for items in each}
    if isinstance(rule, Items) and len(counts) == 1:
        return [
            combine(rule.rules[index % len(rule.rules)], MISSING, column, weights)
            for index, column in enumerate(zip(*each, strict=True))
        ]
    return [item for items in each for item in items]


def items_after(before: Any, value: Any) -> list[Any] | None:
    """The items that were appended to a list or deque, which may have lost its first; else None."""
    old = list(before) if isinstance(before, (list, deque)) else []
    items = list(value)
    dropped = len(old) + 1 if isinstance(value, deque) and value.maxlen is not None else 1
    for first in range(dropped):
        kept = old[first:]
        if len(items) >= len(kept) and all(map(same, kept, items)):
            return items[len(kept) :]
    return None


def extended(before: Any, items: Iterable[Any]) -> Any:
    """A list or deque with more items; a list where there was none."""
    if isinstance(before, deque):
        return type(before)([*before, *items], before.maxlen)
    return [*(before if isinstance(before, list) else []), *items]


def _candidates(seen: Seen, path: str) -> Iterator[Rule]:
    kinds = {_kind(value) for value in (seen.whole, *seen.parts)}
    kind = kinds.pop() if len(kinds) == 1 else "other"
    # A list is extended, where it could be replaced, as only what is new is sent to other stages.
    if kind == "sequence" and (rule := _appending(seen, path)) is not None:
        yield rule
    yield "once"
    if kind in ("number", "array"):
        yield from ("sum", "mean", "total") if _is_number(seen.before) else ("total", "sum", "mean")
    if kind == "array":
        yield from map(Joined, range(_dims(seen.whole)))
    elif kind == "set":
        yield "union"
    elif kind in ("sequence", "entries"):
        yield _entry_rules(seen, path)


def _kind(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return "array"
    if isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool):
        return "number"
    if isinstance(value, (list, deque)):
        return "sequence"
    if isinstance(value, (set, frozenset)):
        return "set"
    return "entries" if isinstance(value, (tuple, Mapping)) or is_object(value) else "other"


def _is_number(value: Any) -> bool:
    return _kind(value) in ("number", "array")


def _dims(value: Any) -> int:
    return int(value.ndim)


def _holds(rule: Rule, seen: Seen) -> bool:
    """Whether a rule holds in all runs."""
    try:
        if rule == "once":
            holds = all(_close(part, seen.whole, seen) for part in seen.parts)
        else:
            combined = combine(rule, seen.before, seen.parts, seen.weights)
            holds = _close(combined, seen.whole, seen)
    except (RuntimeError, TypeError, ValueError):  # Shapes or types that do not go together.
        return False
    return holds and (seen.again is None or _holds(rule, seen.again))


def _close(one: Any, other: Any, seen: Seen) -> bool:
    """Whether two values are equal up to errors that are small beside the batch's change."""
    if not _is_number(one) or not _is_number(other):
        return _same_or_opaque(one, other)
    one, other = _as_double(one), _as_double(other)
    if one.shape != other.shape:
        return False
    largest = max(_largest(one), _largest(other))
    change = _change(seen)
    allowed = seen.tolerance * (largest if change is None else min(change, largest))
    if not _is_integer(seen.whole):
        allowed += _EPSILON * largest
    equal = (one == other) | ((one != one) & (other != other))
    return bool((equal | ((one - other).abs() <= allowed)).all())


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iub")


def _largest(tensor: Tensor) -> float:
    """The largest absolute value of the finite ones."""
    return float(torch.nan_to_num(tensor.abs(), 0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


_EPSILON = 1e-7  # Of values that were computed in float32, the error beside a small change.


def _change(seen: Seen) -> float | None:
    """How much the whole batch has changed the value, if that is known."""
    if not _is_number(seen.before) or not _is_number(seen.whole):
        return None
    before, whole = _as_double(seen.before), _as_double(seen.whole)
    if before.shape != whole.shape or not whole.numel():
        return None
    return _largest(whole - before)


def _same_or_opaque(one: Any, other: Any) -> bool:
    """Of objects that cannot be compared, such as functions, one is as good as the other."""
    if same(one, other):
        return True
    is_opaque = _kind(one) == "other" and "__eq__" not in vars(type(one))
    return is_opaque and type(one) is type(other)


def _as_double(value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _total(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor) and parts[0].dtype is torch.bool:
        raise TypeError
    if len({getattr(part, "shape", ()) for part in parts}) > 1:
        raise ValueError
    return reduce(lambda one, other: one + other, parts)


def _sum(before: Any, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    if not _is_number(before):
        return _total(parts)
    return before + _total([part - before for part in parts])


def _mean(before: Any, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    first = parts[0]
    if isinstance(first, int) or (
        isinstance(first, Tensor) and not (first.is_floating_point() or first.is_complex())
    ):
        raise TypeError
    return _total([part * weight for part, weight in zip(parts, weights, strict=True)])


def _union(before: Any, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    return set().union(*parts)


_COMBINE: Mapping[Any, Callable[[Any, Sequence[Any], Sequence[float]], Any]] = {
    "once": lambda before, parts, weights: parts[-1],
    "sum": _sum,
    "mean": _mean,
    "total": lambda before, parts, weights: _total(parts),
    "union": _union,
}


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), dim)
    return np.concatenate(parts, dim)


def _appending(seen: Seen, path: str) -> Rule | None:
    """The rule of a list that grows, or is replaced, if there is one."""
    grows = all(items_after(seen.before, value) is not None for value in (seen.whole, *seen.parts))
    new, parts = _new_items(seen)
    if not new:
        return None
    if all(len(part) == len(new) for part in parts):
        return Items(tuple(_item_rules(seen, path))) if grows else None
    joined = [item for part in parts for item in part]
    is_joined = len(joined) == len(new) and all(
        _close(one, other, seen._replace(before=MISSING))
        for one, other in zip(joined, new, strict=True)
    )
    return Appended() if is_joined else None


def _new_items(seen: Seen) -> tuple[list[Any], list[list[Any]]]:
    """The items that the batch has appended, and each micro-batch; all, of a list that is new."""
    values = seen.whole, *seen.parts
    grows = all(items_after(seen.before, value) is not None for value in values)
    new, *parts = (items_after(seen.before if grows else [], value) or [] for value in values)
    return new, parts


def _item_rules(seen: Seen, path: str) -> Iterator[Rule]:
    """The rule of each item that is appended."""
    runs = [seen] if seen.again is None else [seen, seen.again]
    each = [_new_items(run) for run in runs]
    for index in range(len(each[0][0])):
        first, *again = (
            run._replace(before=MISSING, whole=new[index], parts=[part[index] for part in parts])
            for run, (new, parts) in zip(runs, each, strict=True)
            if all(len(items) > index for items in (new, *parts))
        )
        yield find(first._replace(again=again[0] if again else None), f"{path}[...]")


def _entry_rules(seen: Seen, path: str) -> Entries:
    """The rule of each entry of a collection, or attribute of an object.

    Raises:
        Unexplained: if an entry has none, or micro-batches have other entries than the batch.
    """
    whole = entries(seen.whole)
    parts = [entries(part) for part in seen.parts]
    may_differ = isinstance(seen.whole, Mapping) or is_object(seen.whole)
    if {key for part in parts for key in part} != whole.keys() or not (
        may_differ or all(part.keys() == whole.keys() for part in parts)
    ):
        raise Unexplained(path, seen)
    rules = {}
    for key in whole:
        inner = _entry(seen, key)
        if not all(same(inner.before, each) for each in (inner.whole, *inner.parts)):
            rules[key] = find(inner, path + key.text)
    return Entries(rules, next(iter(rules.values()), "once"))


def _entry(seen: Seen, key: Key) -> Seen:
    """What runs have made of an entry."""
    whole = entries(seen.whole).get(key, MISSING)
    absent = _nothing(whole)
    return seen._replace(
        before=entries(seen.before).get(key, MISSING),
        whole=whole,
        parts=[entries(part).get(key, absent) for part in seen.parts],
        again=seen.again and _entry(seen.again, key),
    )


def _nothing(value: Any) -> Any:
    """What a micro-batch adds to an entry that it has not made."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return type(value)() if _is_number(value) and not isinstance(value, np.ndarray) else MISSING


def _combined_entries(
    rule: Entries, before: Any, parts: Sequence[Any], weights: Sequence[float]
) -> Any:
    old, each = entries(before), [entries(part) for part in parts]
    made = {}
    for key in dict.fromkeys(key for part in each for key in part):
        was = old.get(key, MISSING)
        held = [(part[key], w) for part, w in zip(each, weights, strict=True) if key in part]
        values, shares = zip(*held, strict=True)
        is_changed = not all(same(value, was) for value in values)
        made[key] = combine(rule.of(key), was, values, shares) if is_changed else was
    return with_entries(parts[0], made)
