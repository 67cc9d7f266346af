"""Finds how the values that micro-batches leave in an attribute make up that of the whole batch.

Every micro-batch begins with what the attribute was before the batch. A rule says what the batch
ends with, given what each micro-batch has made of it:

    once        what each of them made of it, as all made the same (`self.steps += 1`)
    sum         what it was, and the sum of the changes (`self.samples += len(x)`); a union of sets
    mean        the weighted mean (`self.average = 0.9 * self.average + 0.1 * x.mean()`)
    Joined      the values one after the other (`self.last = logits`)
    Grown       a list that grows: what is appended to it has a rule of its own
    Entries     each entry of a collection, or attribute of an object, has a rule of its own

What the whole batch has made of the attribute shows which rule holds. That may be chance: a running
minimum of a loss looks like a mean in the first batch. So the batch and its micro-batches are run a
second time, from what the whole batch has left, and the rule has to hold there, too.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import Key
from lightning_axosparse.pipeline.state.module_state import Place
from lightning_axosparse.pipeline.state.values import (
    MISSING,
    entries,
    is_object,
    same,
    with_entries,
)
from lightning_axosparse.support.troubleshooting import see


@dataclass(frozen=True)
class Joined:
    """Tensors, arrays or lists are concatenated along a dimension."""

    dim: int


@dataclass(frozen=True)
class Grown:
    """The items that are appended to a list follow a rule, as one list."""

    items: Rule


@dataclass(frozen=True)
class Entries:
    """Each entry of a collection has its rule, and the others, which may be new, a common one."""

    rules: Mapping[Key, Rule]
    others: Rule


Rule: TypeAlias = Literal["once", "sum", "mean"] | Joined | Grown | Entries


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
    appended = _appended(seen)
    if appended is not None:
        return Grown(find(appended, path))
    kinds = {_kind(value) for value in (seen.whole, *seen.parts)}
    kind = kinds.pop() if len(kinds) == 1 else "other"
    for rule in _candidates(kind, seen):
        if _holds(rule, seen):
            return rule
    if kind not in ("list", "entries"):
        raise Unexplained(path, seen)
    return _entry_rules(seen, path)


def combine(rule: Rule, before: Any, parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """What the batch ends with.

    Args:
        rule: of the attribute.
        before: what it was.
        parts: what each micro-batch has made of it.
        weights: of the micro-batches, which add up to one.

    Raises:
        RuntimeError, TypeError, ValueError: if the values are not of the kind that the rule is for.
    """
    if len(parts) == 1 or rule == "once":
        return parts[-1]
    if isinstance(rule, Joined):
        return _joined(parts, rule.dim)
    if isinstance(rule, Grown):
        items = [items_after(before, part) for part in parts]
        if any(each is None for each in items):
            raise ValueError
        return extended(before, combine(rule.items, MISSING, items, weights))
    if isinstance(rule, Entries):
        return _combined_entries(rule, before, parts, weights)
    if rule == "mean":
        if any(_is_integer(part) for part in parts):
            raise TypeError
        return _total([part * weight for part, weight in zip(parts, weights, strict=True)])
    if not _is_number(before):
        return _total(parts)
    return before + _total([part - before for part in parts])


def items_after(before: Any, value: Any) -> list[Any] | None:
    """The items that were appended to a list or deque, which may have lost its first; else None."""
    if not isinstance(value, (list, deque)):
        return None
    old, items = list(before) if isinstance(before, (list, deque)) else [], list(value)
    dropped = len(old) + 1 if isinstance(value, deque) and value.maxlen is not None else 1
    for first in range(dropped):
        kept = old[first:]
        is_kept = all(map(operator.is_, kept, items)) or all(map(same, kept, items))
        if len(items) >= len(kept) and is_kept:
            return items[len(kept) :]
    return None


def extended(before: Any, items: Iterable[Any]) -> Any:
    """A list or deque with more items; a list where there was none."""
    if isinstance(before, deque):
        return type(before)([*before, *items], before.maxlen)
    return [*(before if isinstance(before, list) else []), *items]


def _appended(seen: Seen) -> Seen | None:
    """What all runs have appended to a list; None if one has not, or has done something else."""
    runs = [seen] if seen.again is None else [seen, seen.again]
    made: list[Seen] = []
    for run in runs:
        whole, *parts = (items_after(run.before, value) for value in (run.whole, *run.parts))
        if not whole or any(part is None for part in parts):
            return None
        made.append(run._replace(before=MISSING, whole=whole, parts=parts, again=None))
    if not any(isinstance(run.before, (list, deque)) for run in runs):
        return None
    return made[0]._replace(again=made[-1] if seen.again else None)


def _candidates(kind: str, seen: Seen) -> Iterator[Rule]:
    yield "once"
    if kind in ("number", "array"):
        yield from ("sum", "mean")
    if kind == "array":
        yield from map(Joined, range(seen.whole.ndim))
    elif kind == "list":
        yield Joined(0)
    elif kind == "set":
        yield "sum"


def _kind(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return "array"
    if isinstance(value, (int, float, complex, np.number)) and not isinstance(value, bool):
        return "number"
    if isinstance(value, (list, deque)):
        return "list"
    if isinstance(value, (set, frozenset)):
        return "set"
    return "entries" if isinstance(value, (tuple, Mapping)) or is_object(value) else "other"


def _is_number(value: Any) -> bool:
    return _kind(value) in ("number", "array")


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


_EPSILON = 1e-7  # Of values that were computed in float32, the error beside a small change.


def _close(one: Any, other: Any, seen: Seen) -> bool:
    """Whether two values are equal up to errors that are small beside the batch's change."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(
            _close(a, b, seen._replace(before=MISSING)) for a, b in zip(one, other, strict=True)
        )
    if not (_is_number(one) and _is_number(other)):
        # Of objects that cannot be compared, such as functions, one is as good as the other.
        is_opaque = _kind(one) == "other" and "__eq__" not in vars(type(one))
        return same(one, other) or (is_opaque and type(one) is type(other))
    one, other = _as_double(one), _as_double(other)
    if one.shape != other.shape:
        return False
    largest = max(_largest(one), _largest(other))
    allowed = seen.tolerance * min(_change(seen), largest)
    if not _is_integer(seen.whole):
        allowed += _EPSILON * largest
    return torch.allclose(one, other, rtol=0, atol=allowed, equal_nan=True)


def _is_integer(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int) or (hasattr(value, "dtype") and value.dtype.kind in "iub")


def _largest(tensor: Tensor) -> float:
    """The largest absolute value of the finite ones."""
    return float(torch.nan_to_num(tensor.abs(), 0.0, 0.0, 0.0).max()) if tensor.numel() else 0.0


def _change(seen: Seen) -> float:
    """How much the whole batch has changed the value; infinite if that is not known."""
    if not _is_number(seen.before) or not _is_number(seen.whole):
        return inf
    before, whole = _as_double(seen.before), _as_double(seen.whole)
    return _largest(whole - before) if before.shape == whole.shape and whole.numel() else inf


def _as_double(value: Any) -> Tensor:
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _total(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], (set, frozenset)):
        return reduce(operator.or_, parts)
    if isinstance(parts[0], Tensor) and parts[0].dtype is torch.bool:
        raise TypeError
    if len({getattr(part, "shape", ()) for part in parts}) > 1:
        raise ValueError
    return reduce(operator.add, parts)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), dim)
    if isinstance(parts[0], list):
        return reduce(operator.add, parts)
    return np.concatenate(parts, dim)


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
    is_new = isinstance(seen.whole, list) and seen.before is MISSING
    for key in whole:
        inner = _entry(seen, key)
        if not all(same(inner.before, each) for each in (inner.whole, *inner.parts)):
            rules[key] = find(inner, path + ("[...]" if is_new else key.text))
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
        of_entry = rule.rules.get(key, rule.others)
        made[key] = combine(of_entry, was, values, shares) if is_changed else was
    return with_entries(parts[0], made)


_HOOKS = (
    "Change it in a hook such as `on_train_batch_end`, which runs once a batch, or use a "
    "torchmetric; AxoSparseStrategy(microbatches=1) is exact."
)


def unexplained(place: Place, path: str, seen: Seen) -> str:
    """What to say of an attribute of which micro-batches make something else than the batch.

    Args:
        place: the attribute.
        path: of the entry of it that differs.
        seen: what the runs have made of that.
    """
    parts = ", ".join(map(_brief, seen.parts))
    return (
        f"The step changes `{place}{path}` from {_brief(seen.before)} to {_brief(seen.whole)} with "
        f"the whole batch, and its micro-batches change it to {parts}: no sum, mean or "
        "concatenation of these is what one process would have, so one micro-batch after the "
        f"other changes it, and a loss that reads it is another one. {_HOOKS}" + see("steps")
    )


def trained(place: Place) -> str:
    """What to say of a parameter that is trained, and that a step changes in each run again."""
    return (
        f"The step changes the values of `{place}`, which is trained, in every micro-batch again. "
        "Change them once a batch, in `on_before_zero_grad` or `on_train_batch_end`; "
        "AxoSparseStrategy(microbatches=1) is exact." + see("steps")
    )


def not_sent(place: Place) -> str:
    """What to say of an attribute that is too large to be sent to the other stages."""
    return (
        f"The step changes `{place}`, but a rank runs the step only as far as the layers of its "
        "stage, and what is new is larger than 1 MB, or an object that cannot be sent: before the "
        "last stage hooks find what was made there. Log values or torchmetrics objects, which "
        "every rank receives, or take what the step returns in a hook such as "
        "`on_train_batch_end`, with AxoSparseStrategy(step_outputs='all')." + see("steps")
    )


def not_alike(place: Place, parts: Sequence[Any]) -> str:
    """What to say of an attribute that micro-batches change otherwise than in the first batch."""
    return (
        f"The step changes `{place}` in other ways than in its first batch: the micro-batches of "
        f"this one make {', '.join(map(_brief, parts))} of it, of which the last is kept. {_HOOKS}"
        + see("steps")
    )


def _brief(value: Any) -> str:
    """A number itself; of anything else what it is."""
    if value is MISSING:
        return "nothing"
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            return f"{type(value).__name__.lower()} of shape {tuple(value.shape)}"
        value = value.item()
    if isinstance(value, (int, float)):
        return f"{value:.6g}"
    name = "None" if value is None else type(value).__name__
    return f"{name} of {len(value)} entries" if hasattr(value, "__len__") else name
