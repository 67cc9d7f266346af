"""Lets the micro-batches of a batch change the state of a module as the whole batch would.

Each micro-batch begins with the state that the module had before the batch, on a copy of its own,
so that it reads what one process reads, and autograd keeps what it has read. When all of them have
run, the rules of ``rules`` make the batch's value of theirs. What a step changes outside the
layers counts on the last stage, which alone runs the step to its end; the other stages get it from
there. Runs of the first batch show what a step changes, and by which rule: ``dry_run``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.state.module_state import (
    Place,
    held_by,
    hold,
    owner_of,
    value_at,
    write,
)
from lightning_axosparse.pipeline.state.rules import (
    Grown,
    Rule,
    combine,
    items_after,
    not_alike,
    not_sent,
)
from lightning_axosparse.pipeline.state.values import MISSING, copied, detached, size_of

LARGEST_MESSAGE = 2**20
"""Bytes of state that the last stage sends to the others after a batch."""

_NUMBERS = frozenset({int, float, bool})


class StepState:
    """Follows what steps change on a module; this one does nothing."""

    def begin(self, stage: int) -> None:
        """Prepare for the step of a micro-batch on a stage."""

    def end(self, stage: int) -> None:
        """Take in what it has changed."""

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember what a layer reads now.

        Args:
            layer: the layer, which is about to be computed.

        Returns:
            What makes a context in which it reads that again; what it changes in it is undone.
        """
        return nullcontext


class Changing(NamedTuple):
    """An attribute that a step changes.

    Attributes:
        place: the attribute.
        rule: how micro-batches make up the batch; None if they change it one after the other.
        sent: whether other stages get it from the last one; else they make it themselves.
    """

    place: Place
    rule: Rule | None
    sent: bool = True


class StateRules(NamedTuple):
    """What a step changes on the module, the same on all ranks.

    Attributes:
        changing: the attributes that make up that of the batch from those of micro-batches.
        left: those that each stage leaves as its steps have, one after the other.
    """

    changing: Sequence[Changing] = ()
    left: frozenset[Place] = frozenset()

    @property
    def places(self) -> frozenset[Place]:
        """All that the step changes."""
        return self.left.union(each.place for each in self.changing)

    def besides(self, earlier: StateRules) -> StateRules:
        """These rules, and those of an earlier batch for what this one did not change."""
        known = self.places
        changing = [each for each in earlier.changing if each.place not in known]
        return StateRules([*changing, *self.changing], self.left | (earlier.left - known))


class Sent(NamedTuple):
    """What the other stages get of an attribute.

    Attributes:
        place: the attribute.
        how: whether the value replaces the object that it holds, or its content, or extends it.
        value: of the attribute, or what is new in it.
    """

    place: Place
    how: Literal["replace", "overwrite", "extend"]
    value: Any


@dataclass
class _Changed:
    """An attribute that a step changes, in one batch.

    Attributes:
        changing: the attribute.
        stage: the stage whose changes count; None on ranks that have not that stage.
        is_in_layer: whether it is in a pipelined layer.
        is_shared: whether it is made on the last stage, and sent to the other ranks of the batch.
        owner: what has it.
        before: the object that it held before the batch, or before the step that runs.
        lent: what the running micro-batch has instead.
        parts: what each micro-batch has made of it; of a list that grows the items, None where it
            has not grown.
        last: what the last one has made of it.
        in_place: whether that one has changed what it was lent, and not replaced it.
    """

    changing: Changing
    stage: int | None
    is_in_layer: bool
    is_shared: bool
    owner: Any
    before: Any = MISSING
    lent: Any = MISSING
    parts: list[Any] = field(default_factory=list)
    last: Any = MISSING
    in_place: bool = False

    @property
    def held(self) -> Any:
        """What the attribute holds now."""
        return held_by(self.owner, self.changing.place.name)

    def hold(self, value: Any) -> None:
        """Let the attribute hold another value."""
        hold(self.owner, self.changing.place.name, value)

    def lend(self) -> None:
        """Let the attribute hold a copy, so that what is done to it can be taken back."""
        self.before = self.held
        self.lent = self.copied()
        if self.lent is not self.before:
            self.hold(self.lent)

    def copied(self) -> Any:
        """A copy of what the attribute holds."""
        value = self.held
        if isinstance(self.changing.rule, Grown):  # The items stay as they are.
            return copy.copy(value)
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value
        if isinstance(value, nn.Parameter):
            lent = nn.Parameter(value.detach().clone(), value.requires_grad)
            vars(lent).update(vars(value))  # as the whole shape of what this rank has a part of
            return lent
        return copied(value)

    def take_back(self, counts: bool) -> None:
        """Let the attribute hold what it held before; keep what the micro-batch made of it."""
        value = self.held
        if counts:
            self.in_place = value is self.lent and self.lent is not self.before
            grows = isinstance(self.changing.rule, Grown)
            self.last = value if grows else detached(value)
            self.parts.append(detached(items_after(self.before, value)) if grows else self.last)
        self.hold(self.before)
        self.lent = MISSING

    def made(self, weights: Sequence[float]) -> tuple[Sent, str | None]:
        """What the batch makes of it, and what to warn of."""
        place, rule, parts = self.changing.place, self.changing.rule, self.parts
        if rule is None:
            return Sent(place, "replace", self.held), None
        in_place = self.in_place or isinstance(self.before, nn.Parameter)
        made = Sent(place, "overwrite" if in_place else "replace", self.last)
        if rule == "once":
            numbers = {part for part in parts if type(part) in _NUMBERS}
            warning = not_alike(place, parts) if len(numbers) > 1 else None
            return made._replace(value=parts[-1]), warning
        try:
            if not isinstance(rule, Grown):
                return made._replace(value=combine(rule, self.before, parts, weights)), None
            if all(part is not None for part in parts):
                return Sent(place, "extend", combine(rule.items, MISSING, parts, weights)), None
        except (RuntimeError, TypeError, ValueError):  # Of other shapes than in the first batch.
            pass
        return made, not_alike(place, parts)


class BatchState(StepState):
    """What steps change on the module of this rank.

    Args:
        module: the user's module.
        stages: the stages of this rank.
        last_stage: the last stage of the pipeline.
        stage_of: returns the stage of the layer that a name belongs to; None outside the layers.
        sends: whether other ranks are given the same batches.
        device: of this rank.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[int],
        last_stage: int,
        stage_of: Callable[[str], int | None],
        sends: bool,
        device: torch.device,
    ) -> None:
        self._module, self._stages, self._last_stage = module, stages, last_stage
        self._stage_of, self._sends, self._device = stage_of, sends, device
        self._changed: dict[Place, _Changed] = {}
        self._made: dict[Place, Sent] = {}
        self._rules = StateRules()
        self._weights: list[float] = []
        self._weights_shared: list[float] = []
        self._begun: dict[int, int] = {}
        self._attributes: dict[str, Any] = {}
        # Code before the layers runs once a stage here: the last one's changes count.
        self._buffers = [
            buffer
            for name, buffer in module.named_buffers()
            if len(stages) > 1 and stage_of(name) is None
        ]
        self._buffers_before: list[Tensor] = []

    def begin_batch(self, rules: StateRules, microbatches: Sequence[MicroBatch]) -> None:
        """Prepare for a batch.

        Args:
            rules: what its step changes.
            microbatches: those that this rank computes.
        """
        total = sum(part.weight for part in microbatches) or 1.0
        self._weights = self._weights_shared = [part.weight / total for part in microbatches]
        self._begun = dict.fromkeys(self._stages, 0)
        self._rules, self._made = rules, {}
        self._changed = {
            each.place: known for each in rules.changing if (known := self._found(each))
        }

    def _found(self, changing: Changing) -> _Changed | None:
        """An attribute as it is now; None if this rank has it not."""
        layer_stage = self._stage_of(changing.place.dotted)
        owner = owner_of(self._module, changing.place)
        if owner is None or not (layer_stage is None or layer_stage in self._stages):
            return None
        stage = self._last_stage if layer_stage is None else layer_stage
        here: int | None = stage
        if stage not in self._stages:
            here = None if changing.sent else self._stages[-1]
        is_whole = len(self._stages) > self._last_stage
        is_shared = changing.sent and (layer_stage is None or is_whole)
        before = held_by(owner, changing.place.name)
        return _Changed(changing, here, layer_stage is not None, is_shared, owner, before)

    def begin(self, stage: int) -> None:
        """Prepare for the step of a micro-batch on a stage."""
        self._begun[stage] += 1
        for changed in self._put_back_after(stage):
            changed.lend()
        self._attributes = vars(self._module).copy()
        if stage != self._last_stage and self._buffers:
            self._buffers_before = [buffer.clone() for buffer in self._buffers]

    def end(self, stage: int) -> None:
        """Take in what the step has changed."""
        before = self._attributes
        for name, value in vars(self._module).items():
            if before.get(name) is not value and type(value) in _NUMBERS:
                self._note_number(name, before.get(name, getattr(type(self._module), name, None)))
        for changed in self._put_back_after(stage):
            changed.take_back(changed.stage == stage)
        if stage != self._last_stage and self._buffers:
            for buffer, value in zip(self._buffers, self._buffers_before, strict=True):
                buffer.data.copy_(value)  # which autograd does not take for a change

    def _put_back_after(self, stage: int) -> list[_Changed]:
        """What is put back after the step of a micro-batch on a stage."""
        return [
            each
            for each in self._changed.values()
            if each.changing.rule is not None or each.stage != stage
        ]

    def _note_number(self, name: str, before: Any) -> None:
        """Take in that a number of the module changes which did not in the first batch."""
        place = Place((), name)
        is_known = place in self._changed or place in self._rules.left
        if is_known or type(before) not in _NUMBERS:
            return
        changed = self._found(Changing(place, "once"))
        assert changed is not None
        changed.before = before
        if changed.stage is not None:
            changed.parts = [before] * (self._begun[changed.stage] - 1)
        self._changed[place] = changed

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember what the layers read now."""
        now = [(each, each.copied()) for each in self._changed.values() if each.is_in_layer]
        return partial(_remembered, now) if now else nullcontext

    def recorded(self) -> dict[Place, list[Any]]:
        """What micro-batches have made of what other ranks get, on the last stage."""
        parts = {each.changing.place: each.parts for each in self._shared()}
        return dict(move_data_to_device(parts, "cpu"))

    def join(self, recorded: Sequence[Mapping[Place, list[Any]]], weights: Sequence[float]) -> None:
        """Take in what the replicas that share a batch have :meth:`recorded`, in their order.

        Args:
            recorded: by each replica, this one among them.
            weights: of the micro-batches of all.
        """
        self._weights_shared = list(weights)
        for each in self._shared():
            parts = [p for theirs in recorded for p in theirs.get(each.changing.place, ())]
            each.parts = move_data_to_device(parts, self._device)

    def made_shared(self) -> tuple[list[Sent], list[str]]:
        """What the batch makes of what other ranks get, on the last stage.

        Returns:
            What they get, and what to warn of.
        """
        sent: list[Sent] = []
        warnings: list[str | None] = []
        size = 0.0
        for each in self._shared():
            made, warning = each.made(self._weights_shared)
            self._made[made.place] = made
            warnings.append(warning)
            if self._sends and size + size_of(made.value) > LARGEST_MESSAGE:
                warnings.append(not_sent(made.place))
                continue
            size += size_of(made.value)
            sent.append(made._replace(value=move_data_to_device(made.value, "cpu")))
        return sent, list(filter(None, warnings))

    def settle(self, sent: Sequence[Sent]) -> list[str]:
        """Let the module have what the batch makes of its state.

        Args:
            sent: what :meth:`made_shared` has returned on the last stage.

        Returns:
            What to warn of.
        """
        warnings: list[str | None] = []
        values = {
            each.place: each._replace(value=move_data_to_device(each.value, self._device))
            for each in sent
        }
        for each in self._counted():
            place = each.changing.place
            if place in self._made:
                values[place] = self._made[place]
            elif place not in values:
                values[place], warning = each.made(self._weights)
                warnings.append(warning)
        for value in values.values():
            self._write(value)
        self._changed.clear()
        self._made.clear()
        self._attributes, self._buffers_before = {}, []
        return list(filter(None, warnings))

    def _shared(self) -> list[_Changed]:
        """What is made of all micro-batches of the batch here, and sent to the other ranks."""
        return [each for each in self._counted() if each.is_shared]

    def _counted(self) -> list[_Changed]:
        """What this rank's stages have changed in this batch."""
        return [
            each
            for each in self._changed.values()
            if each.stage is not None and (each.parts or each.changing.rule is None)
        ]

    def _write(self, sent: Sent) -> None:
        """Give an attribute the value that a batch has made of it."""
        place, how, value = sent
        now = value_at(self._module, place)
        if how == "extend" and isinstance(now, (list, deque)):
            now.extend(value)
        else:
            write(self._module, place, value, in_place=how == "overwrite")


@contextmanager
def _remembered(values: Sequence[tuple[_Changed, Any]]) -> Iterator[None]:
    """Let attributes hold these values inside the context."""
    before = [each.held for each, _ in values]
    for each, value in values:
        each.hold(value)
    try:
        yield
    finally:
        for (each, _), value in zip(values, before, strict=True):
            each.hold(value)
