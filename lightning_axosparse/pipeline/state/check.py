"""Finds what a step changes on a module, in runs of its first batch that leave no trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.state.batch_state import LARGEST_MESSAGE, Changing, StateRules
from lightning_axosparse.pipeline.state.module_state import Place, value_at
from lightning_axosparse.pipeline.state.rules import (
    Rule,
    Seen,
    Unexplained,
    find,
    not_sent,
    trained,
    unexplained,
)
from lightning_axosparse.pipeline.state.values import same, size_of


class Found(NamedTuple):
    """What the runs of a stage show of an attribute that its step changes; can be pickled.

    Attributes:
        place: the attribute.
        stage: the stage.
        is_outside: whether it is outside the layers.
        is_trained: whether it is a parameter that is trained.
        rule: as for :class:`Changing`; None if it is not known.
        advice: what to say of it.
        is_sent: whether a message can hold it.
        is_left: whether the stage leaves it as its steps have.
    """

    place: Place
    stage: int
    is_outside: bool
    is_trained: bool
    rule: Rule | None
    advice: str
    is_sent: bool
    is_left: bool = False


class StageChanges(NamedTuple):
    """What the steps of a stage have changed on the module, each from the same state.

    Attributes:
        whole: what the whole batch has changed.
        parts: what each micro-batch has changed.
        written: what the whole batch has written to, though it may be equal: a teacher, for
            example, that is still equal to its student.
    """

    whole: Mapping[Place, Any]
    parts: Sequence[Mapping[Place, Any]]
    written: Collection[Place] = ()

    @property
    def places(self) -> list[Place]:
        """All that a run has changed."""
        changed = (self.whole, *self.parts, sorted(self.written, key=str))
        return list(dict.fromkeys(place for each in changed for place in each))


class StateCheck(NamedTuple):
    """Finds by which rules the stages of this rank change the module.

    Attributes:
        module: the user's module, in its state before the runs.
        trained: the ids of the parameters that an optimizer changes.
        stage_of: returns the stage of the layer that a name belongs to; None outside the layers.
        weights: of the micro-batches.
        tolerance: largest relative error of a change.
    """

    module: nn.Module
    trained: Collection[int]
    stage_of: Callable[[str], int | None]
    weights: Sequence[float]
    tolerance: float

    def found(
        self, first: Mapping[int, StageChanges], again: Mapping[int, StageChanges]
    ) -> list[Found]:
        """What runs show.

        Args:
            first: per stage, the changes from the state before the runs.
            again: those from what the whole batch has left; nothing if there were no such runs.
        """
        found = []
        for stage, changes in first.items():
            registers = any(place.is_of_hooks for place in changes.places)
            for place in changes.places:
                layer_stage = self.stage_of(place.dotted)
                if place.is_of_hooks or layer_stage not in (None, stage):
                    continue
                value = value_at(self.module, place)
                seen = self._seen(place, changes, value, value)
                if stage in again:
                    second = self._seen(place, again[stage], value, seen.whole)
                    seen = seen._replace(again=second)
                each = self._found(place, stage, layer_stage is None, value, seen)
                if registers and _is_settled(seen):
                    # It says that hooks are registered, which no micro-batch takes back.
                    each = each._replace(is_left=True, advice="")
                found.append(each)
        return found

    def _seen(self, place: Place, changes: StageChanges, value: Any, before: Any) -> Seen:
        whole = changes.whole.get(place, value)
        parts = [each.get(place, value) for each in changes.parts]
        return Seen(before, whole, parts, self.weights, self.tolerance)

    def _found(self, place: Place, stage: int, is_outside: bool, value: Any, seen: Seen) -> Found:
        rule, advice = None, ""
        is_trained = (
            isinstance(value, nn.Parameter) and value.requires_grad and id(value) in self.trained
        )
        if is_trained:
            # Backward passes read it after its step: it cannot be put back for the next one.
            advice = "" if len(seen.parts) == 1 or _is_idempotent(seen) else trained(place)
        else:
            try:
                rule = find(seen)
            except Unexplained as error:
                advice = unexplained(place, error.path, error.seen)
        is_sent = size_of(seen.whole) <= LARGEST_MESSAGE
        return Found(place, stage, is_outside, is_trained, rule, advice, is_sent)


def _is_settled(seen: Seen) -> bool:
    """Whether any step leaves the same value, and leaves it alone from then on."""
    return seen.again is not None and all(
        same(part, seen.whole) for part in (*seen.parts, seen.again.whole, *seen.again.parts)
    )


def _is_idempotent(seen: Seen) -> bool:
    """Whether a step leaves a value alone that a step has changed before, as with masks."""
    return seen.again is not None and all(
        isinstance(part, Tensor) and torch.allclose(part, seen.whole, seen.tolerance)
        for part in (*seen.parts, seen.again.whole, *seen.again.parts)
    )


def agree(found: Iterable[Found], last_stage: int, is_whole: bool) -> tuple[StateRules, list[str]]:
    """Combine what the stages of a pipeline have found, the same on all ranks.

    Args:
        found: on all stages.
        last_stage: whose changes count outside the layers.
        is_whole: whether one rank runs all stages.

    Returns:
        What steps change, and what to warn of.
    """
    by_place: dict[Place, dict[int, Found]] = {}
    for each in found:
        by_place.setdefault(each.place, {})[each.stage] = each
    changing, left, warnings = list[Changing](), set[Place](), list[str]()
    for place, stages in by_place.items():
        own = stages.get(last_stage) or next(iter(stages.values()))
        if own.advice:
            warnings.append(own.advice)
        if own.is_left:
            left.add(place)
        if own.is_left or own.is_trained:
            continue
        # The step of a stage that goes no further has not put back what it changed.
        is_earlier = own.is_outside and last_stage not in stages
        changing.append(Changing(place, "once" if is_earlier else own.rule, own.is_sent))
        if own.is_outside and not (own.is_sent or is_whole):
            warnings.append(not_sent(place))
    return StateRules(changing, frozenset(left)), warnings
