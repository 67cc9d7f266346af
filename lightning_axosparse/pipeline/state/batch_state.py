"""Lets the micro-batches of a batch change the state of a module as the whole batch would.

Each micro-batch begins with the state that the module had before the batch, on a copy of its own,
so that it reads what one process reads, and autograd keeps what it has read. When all of them have
run, the rules of ``state_rules`` make the batch's value of theirs. What a step changes outside the
layers counts on the last stage, which alone runs the step to its end; the other stages get it from
there. Runs of the first batch show what a step changes, and by which rule: ``state_check``.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn

from lightning_axosparse.pipeline.batch.microbatch import MicroBatch
from lightning_axosparse.pipeline.state.advice import new_number, not_alike, not_sent
from lightning_axosparse.pipeline.state.module_state import Place, inherited, namespace_of, owner_of
from lightning_axosparse.pipeline.state.rules import (
    Appended,
    Items,
    Rule,
    appended,
    combine,
    extended,
    items_after,
)
from lightning_axosparse.pipeline.state.values import (
    MISSING,
    copied,
    detached,
    overwrite,
    size_of,
)
from lightning_axosparse.support.torch_internals import tree_leaves

LARGEST_MESSAGE = 2**20
"""Bytes of state that the last stage sends to the others after a batch."""

_NUMBERS = frozenset({int, float, bool})


class StepState(Protocol):
    """Follows what steps change on a module."""

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


class _Ignored:
    """Lets steps change what they change."""

    def begin(self, stage: int) -> None:
        """Do nothing."""

    def end(self, stage: int) -> None:
        """Do nothing."""

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Do nothing."""
        return nullcontext


IGNORED: StepState = _Ignored()
"""What is told of steps of which nothing is followed."""


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
        length: how many items that list had before the batch.
        lent: what the running micro-batch has instead.
        parts: what each micro-batch has made of it; of a list that grows the items.
        in_place: whether the last one has changed what it was lent, and not replaced it.
        whole: the indices of those parts of a list that grows that are the whole list.
        restarts: whether micro-batches have put another list in its place.
        is_new: whether the first batch did not change it.
    """

    changing: Changing
    stage: int | None
    is_in_layer: bool
    is_shared: bool
    owner: Any
    before: Any = MISSING
    length: int = 0
    lent: Any = MISSING
    parts: list[Any] = field(default_factory=list)
    in_place: bool = False
    whole: set[int] = field(default_factory=set)
    restarts: bool = False
    is_new: bool = False

    def __post_init__(self) -> None:
        self.before = self.held()
        self.length = len(self.before) if isinstance(self.before, list) else 0

    @property
    def grows(self) -> bool:
        """Whether it is a list that grows."""
        return isinstance(self.changing.rule, (Items, Appended))

    def held(self) -> Any:
        """What the attribute holds, or the class in its place."""
        name = self.changing.place.name
        value = namespace_of(self.owner, name).get(name, MISSING)
        return inherited(self.owner).get(name, MISSING) if value is MISSING else value

    def hold(self, value: Any) -> None:
        """Let the attribute hold another value."""
        name = self.changing.place.name
        namespace = namespace_of(self.owner, name)
        if value is MISSING:
            namespace.pop(name, None)
        else:
            namespace[name] = value

    def lend(self) -> None:
        """Let the attribute hold a copy, so that what is done to it can be taken back."""
        if self.changing.rule is None:  # One micro-batch after the other changes it.
            self.before = self.held()
        self.lent = self.copied()
        if self.lent is not self.before:
            self.hold(self.lent)

    def copied(self) -> Any:
        """A copy of what the attribute holds."""
        value = self.held()
        if self.grows:  # The items stay as they are.
            return copy.copy(value)
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value
        if isinstance(value, nn.Parameter):
            return nn.Parameter(value.detach().clone(), value.requires_grad)
        return copied(value)

    def take_back(self, counts: bool) -> None:
        """Let the attribute hold what it held before; keep what the micro-batch made of it."""
        value = self.held()
        if counts:
            self.in_place = value is self.lent and self.lent is not self.before
            self.parts.append(detached(self._kept(value)))
        self.hold(self.before)
        self.lent = MISSING

    def _kept(self, value: Any) -> Any:
        """What is kept of what a micro-batch has made: of a list that it has extended the items."""
        if not (self.grows and isinstance(value, (list, deque))):
            return value
        if self.in_place and isinstance(value, list) and len(value) >= len(self.before):
            return value[len(self.before) :]
        self.whole.add(len(self.parts))
        return copy.copy(value)

    def find_items(self) -> None:
        """Let the parts be the items that are new in a list that micro-batches have replaced."""
        items = {index: items_after(self.before, self.parts[index]) for index in self.whole}
        self.whole.clear()
        if any(each is None for each in items.values()):
            self.restarts = True
        else:
            self.parts = [items.get(index, part) for index, part in enumerate(self.parts)]

    def made(self, weights: Sequence[float]) -> Sent:
        """What the batch makes of it."""
        place, rule = self.changing.place, self.changing.rule
        if rule is None:
            value = self.held()
            if isinstance(value, list) and value is self.before and len(value) >= self.length:
                return Sent(place, "extend", value[self.length :])
            return Sent(place, "replace", value)
        if not self.grows:
            value = combine(rule, self.before, self.parts, weights)
            is_overwritten = self.in_place or isinstance(self.before, nn.Parameter)
            return Sent(place, "overwrite" if is_overwritten else "replace", value)
        self.find_items()
        items = appended(rule, MISSING, self.parts, weights)
        if self.in_place and not self.restarts:
            return Sent(place, "extend", items)
        start = _empty(self.parts[-1]) if self.restarts else self.before
        return Sent(place, "replace", extended(start, items))


class BatchState:
    """What steps change on the module of this rank.

    Args:
        module: the user's module.
        stages: the stages of this rank.
        last_stage: the last stage of the pipeline.
        stage_of: returns the stage of the layer that a name belongs to; None outside the layers.
        sends: whether other ranks are given the same batches.
    """

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[int],
        last_stage: int,
        stage_of: Callable[[str], int | None],
        sends: bool,
    ) -> None:
        self._module, self._stages, self._last_stage = module, stages, last_stage
        self._stage_of, self._sends = stage_of, sends
        self._changed: dict[Place, _Changed] = {}
        self._of_stage: dict[int, list[_Changed]] = {}
        self._weights: list[float] = []
        self._weights_shared: list[float] = []
        self._sizes: list[int] = []
        self._made: list[Sent] = []
        self._has_made = False
        self._begun: dict[int, int] = {}
        self._attributes: dict[str, Any] = {}
        # Code before the layers runs once a stage here: the last one's changes count.
        self._buffers = [
            buffer
            for name, buffer in module.named_buffers()
            if len(stages) > 1 and stage_of(name) is None
        ]
        self._buffers_before: list[Tensor] = []

    def begin_batch(self, changing: Iterable[Changing], microbatches: Sequence[MicroBatch]) -> None:
        """Prepare for a batch.

        Args:
            changing: what its step changes.
            microbatches: those that this rank computes.
        """
        total = sum(part.weight for part in microbatches) or 1.0
        self._weights = self._weights_shared = [part.weight / total for part in microbatches]
        self._sizes = [part.size for part in microbatches]
        self._made, self._has_made = [], False
        self._begun = dict.fromkeys(self._stages, 0)
        self._changed = {each.place: known for each in changing if (known := self._found(each))}
        self._of_stage = {
            stage: [
                each
                for each in self._changed.values()
                if each.changing.rule is not None or each.stage != stage
            ]
            for stage in self._stages
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
        return _Changed(changing, here, layer_stage is not None, is_shared, owner)

    def begin(self, stage: int) -> None:
        """Prepare for the step of a micro-batch on a stage."""
        self._begun[stage] += 1
        for changed in self._of_stage[stage]:
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
        for changed in self._of_stage[stage]:
            changed.take_back(changed.stage == stage)
        if stage != self._last_stage and self._buffers:
            for buffer, value in zip(self._buffers, self._buffers_before, strict=True):
                buffer.data.copy_(value)  # which autograd does not take for a change

    def _note_number(self, name: str, before: Any) -> None:
        """Take in that a number of the module changes which did not in the first batch."""
        place = Place((), name)
        if place in self._changed or type(before) not in _NUMBERS:
            return
        changed = self._found(Changing(place, "once"))
        assert changed is not None
        changed.before, changed.is_new = before, True
        if changed.stage is not None:
            changed.parts = [before] * (self._begun[changed.stage] - 1)
        self._changed[place] = changed
        for known in self._of_stage.values():
            known.append(changed)

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember what a layer reads now.

        Args:
            layer: the layer, which is about to be computed.

        Returns:
            What makes a context in which it reads that again; what it changes in it is undone.
        """
        now = [(each, each.copied()) for each in self._changed.values() if each.is_in_layer]
        return partial(_remembered, now) if now else nullcontext

    def recorded(self) -> dict[Place, list[Any]]:
        """What micro-batches have made of what other ranks get, on the last stage."""
        shared = [each for each in self._counted() if each.is_shared]
        for each in shared:
            each.find_items()
        parts = {each.changing.place: each.parts for each in shared}
        return dict(move_data_to_device(parts, "cpu"))

    def join(self, recorded: Sequence[Mapping[Place, list[Any]]], weights: Sequence[float]) -> None:
        """Take in what the replicas that share a batch have :meth:`recorded`, in their order.

        Args:
            recorded: by each replica, this one among them.
            weights: of the micro-batches of all.
        """
        self._weights_shared = list(weights)
        for each in self._counted():
            if each.is_shared:
                own = each.parts
                each.parts = [p for parts in recorded for p in parts.get(each.changing.place, ())]
                each.parts = move_data_to_device(each.parts, _device_of(own))

    def made_shared(self) -> tuple[list[Sent], list[str]]:
        """What the batch makes of what other ranks get, on the last stage.

        Returns:
            What they get, and what to warn of.
        """
        sent: list[Sent] = []
        warnings: list[str] = []
        size = 0.0
        for each in self._counted():
            if not each.is_shared:
                continue
            value = self._made_of(each, self._weights_shared, warnings)
            if each.changing.rule is not None:
                self._made.append(value)
            if self._sends and size + size_of(value.value) > LARGEST_MESSAGE:
                warnings.append(not_sent(each.changing.place))
                continue
            size += size_of(value.value)
            sent.append(value._replace(value=move_data_to_device(value.value, "cpu")))
        self._has_made = True
        return sent, warnings

    def settle(self, sent: Sequence[Sent], device: torch.device) -> list[str]:
        """Let the module have what the batch makes of its state.

        Args:
            sent: what :meth:`made_shared` has returned on the last stage.
            device: of this rank.

        Returns:
            What to warn of.
        """
        warnings: list[str] = []
        values = self._made
        if not self._has_made:
            values = [each._replace(value=move_data_to_device(each.value, device)) for each in sent]
        received = {each.place for each in sent}
        for each in self._counted():
            is_made = each.is_shared and self._has_made
            if not is_made and each.changing.place not in received:
                value = self._made_of(each, self._weights, warnings)
                values += [value] if each.changing.rule is not None else []
        for value in values:
            _write(self._module, value)
        self._changed.clear()
        self._of_stage = {stage: [] for stage in self._stages}
        self._made, self._attributes, self._buffers_before = [], {}, []
        return warnings

    def _counted(self) -> list[_Changed]:
        """What this rank's stages have changed in this batch."""
        return [
            each
            for each in self._changed.values()
            if each.stage is not None and (each.parts or each.changing.rule is None)
        ]

    def _made_of(self, each: _Changed, weights: Sequence[float], warnings: list[str]) -> Sent:
        if each.is_new:
            rule, is_sure = _likely_rule(each.before, each.parts, self._sizes)
            each.changing = each.changing._replace(rule=rule)
            if not is_sure:
                warnings.append(new_number(each.changing.place, rule))
        elif each.changing.rule == "once" and _differ(each.parts):
            warnings.append(not_alike(each.changing.place, each.parts))
        try:
            return each.made(weights)
        except (RuntimeError, TypeError, ValueError):  # Of other shapes than in the first batch.
            warnings.append(not_alike(each.changing.place, each.parts))
            each.changing = each.changing._replace(rule="once")
            return each.made(weights)


def _empty(items: Any) -> Any:
    """An empty list or deque of the same kind."""
    other = copy.copy(items)
    other.clear()
    return other


@contextmanager
def _remembered(values: Sequence[tuple[_Changed, Any]]) -> Iterator[None]:
    """Let attributes hold these values inside the context."""
    before = [each.held() for each, _ in values]
    for each, value in values:
        each.hold(value)
    try:
        yield
    finally:
        for (each, _), value in zip(values, before, strict=True):
            each.hold(value)


def _differ(parts: Sequence[Any]) -> bool:
    """Whether micro-batches have made different numbers."""
    return type(parts[0]) in _NUMBERS and any(part != parts[0] for part in parts)


def _likely_rule(
    before: Any, parts: Sequence[Any], sizes: Sequence[int]
) -> tuple[Literal["once", "sum", "mean"], bool]:
    """How micro-batches make up a number that the first batch has not changed.

    Returns:
        The rule, and whether it is beyond doubt.
    """
    if max(sizes) > 1 and [part - before for part in parts] == list(sizes):
        return "sum", True
    if not _differ(parts):
        return "once", True
    if isinstance(parts[0], bool):
        return "once", False
    return ("sum", False) if isinstance(parts[0], int) else ("mean", False)


def _write(module: nn.Module, sent: Sent) -> None:
    """Give an attribute the value that a batch has made of it."""
    owner = owner_of(module, sent.place)
    if owner is None:
        return
    namespace = namespace_of(owner, sent.place.name)
    now = namespace.get(sent.place.name)
    if sent.how == "extend" and isinstance(now, (list, deque)):
        now.extend(sent.value)
    elif sent.how == "overwrite" and overwrite(now, sent.value):
        pass
    elif sent.value is MISSING:
        namespace.pop(sent.place.name, None)
    else:
        namespace[sent.place.name] = sent.value


def _device_of(value: Any) -> torch.device:
    leaves = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return next((leaf.device for leaf in leaves), torch.device("cpu"))
