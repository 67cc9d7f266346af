"""Finds what a step changes on a module, in runs of its first batch that leave no trace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.state.advice import not_sent, trained, unexplained
from lightning_axosparse.pipeline.state.batch_state import LARGEST_MESSAGE, Changing
from lightning_axosparse.pipeline.state.module_state import (
    ModuleState,
    Place,
    namespace_of,
    owner_of,
)
from lightning_axosparse.pipeline.state.rules import (
    Rule,
    Seen,
    Unexplained,
    find,
)
from lightning_axosparse.pipeline.state.values import is_readable, size_of
from lightning_axosparse.support.torch_internals import tree_leaves


class Found(NamedTuple):
    """What the runs of a stage show of an attribute that its step changes; can be pickled.

    Attributes:
        place: the attribute.
        stage: the stage.
        is_outside: whether it is outside the layers.
        is_trained: whether it is a parameter that is trained.
        rule: how micro-batches make up the batch; None if it is not known.
        advice: what to say of it.
        size: bytes of a message with its value.
        digest: of that value, if it is too large to be sent.
    """

    place: Place
    stage: int
    is_outside: bool
    is_trained: bool
    rule: Rule | None
    advice: str
    size: float
    digest: bytes


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


class StateCheck:
    """Finds by which rules the stages of this rank change the module.

    Args:
        module: the user's module.
        state: its state before the runs.
        trained: the ids of the parameters that an optimizer changes.
        stage_of: returns the stage of the layer that a name belongs to; None outside the layers.
        weights: of the micro-batches.
        tolerance: largest relative error of a change.
    """

    def __init__(
        self,
        module: nn.Module,
        state: ModuleState,
        trained: Collection[int],
        stage_of: Callable[[str], int | None],
        weights: Sequence[float],
        tolerance: float,
    ) -> None:
        self._module, self._state, self._stage_of = module, state, stage_of
        self._trained = trained
        self._weights, self._tolerance = weights, tolerance

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
            places = dict.fromkeys(
                place
                for each in (changes.whole, *changes.parts, sorted(changes.written, key=str))
                for place in each
            )
            for place in places:
                if self._stage_of(place.dotted) in (None, stage):
                    seen = self._seen(place, changes, self._state.before(place))
                    if stage in again:
                        second = self._seen(place, again[stage], seen.whole)
                        seen = seen._replace(again=second)
                    found.append(self._found(stage, place, seen))
        return found

    def _seen(self, place: Place, changes: StageChanges, before: Any) -> Seen:
        captured = self._state.before(place)
        parts = [each.get(place, captured) for each in changes.parts]
        whole = changes.whole.get(place, captured)
        return Seen(before, whole, parts, self._weights, self._tolerance)

    def _is_trained(self, place: Place) -> bool:
        owner = owner_of(self._module, place)
        value = None if owner is None else namespace_of(owner, place.name).get(place.name)
        return (
            isinstance(value, nn.Parameter) and value.requires_grad and id(value) in self._trained
        )

    def _found(self, stage: int, place: Place, seen: Seen) -> Found:
        rule, advice = None, ""
        is_trained = self._is_trained(place)
        if is_trained:
            # Backward passes read it after its step: it cannot be put back for the next one.
            advice = "" if len(seen.parts) == 1 or _is_idempotent(seen) else trained(place)
        else:
            try:
                rule = find(seen)
            except Unexplained as error:
                advice = unexplained(place, error.path, error.seen)
        size = size_of(seen.whole)
        digest = _digest(seen.whole) if size > LARGEST_MESSAGE else b""
        is_outside = self._stage_of(place.dotted) is None
        return Found(place, stage, is_outside, is_trained, rule, advice, size, digest)


def _is_idempotent(seen: Seen) -> bool:
    """Whether a step leaves a value alone that a step has changed before, as with masks."""
    return seen.again is not None and all(
        isinstance(part, Tensor) and torch.allclose(part, seen.whole, seen.tolerance)
        for part in (*seen.parts, seen.again.whole, *seen.again.parts)
    )


def _digest(value: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and is_readable(leaf):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else str(type(leaf)).encode())
    return digest.digest()


def agree(
    found: Iterable[Found], last_stage: int, is_whole: bool
) -> tuple[list[Changing], list[str]]:
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
    changing, warnings = [], []
    for place, stages in by_place.items():
        own = stages.get(last_stage) or next(iter(stages.values()))
        if own.advice:
            warnings.append(own.advice)
        if own.is_trained:
            continue
        is_sent = own.size <= LARGEST_MESSAGE
        # The step of a stage that goes no further has not put back what it changed.
        rule = "once" if own.is_outside and last_stage not in stages else own.rule
        changing.append(Changing(place, rule, is_sent))
        if own.is_outside and not (is_sent or is_whole):
            digests = {stage: each.digest for stage, each in stages.items()}
            if len(set(digests.values())) > 1 or digests.keys() != set(range(last_stage + 1)):
                warnings.append(not_sent(place))
    return changing, warnings
