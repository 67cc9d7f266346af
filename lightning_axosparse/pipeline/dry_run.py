"""Runs a step forward without a trace, so that a whole batch and its micro-batches compare.

Such runs of the first batch show what the step changes on the module, too.

Modules train as usual, but for BatchNorms, whose statistics are known to differ, and for dropout.
Whatever else the step draws at random, a micro-batch gets the numbers that its samples have in the
whole batch. What the step changes on the module is put back after each micro-batch.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.loss.terms import Term
from lightning_axosparse.pipeline.loss.weights import along
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.profile import peak_bytes
from lightning_axosparse.pipeline.rng import RandomNumbers
from lightning_axosparse.pipeline.stage_step import StageStep, loss_of
from lightning_axosparse.pipeline.state.batch_state import (
    LARGEST_MESSAGE,
    Changing,
    StateRules,
    StepState,
)
from lightning_axosparse.pipeline.state.module_state import ModuleState, Place, value_at, write
from lightning_axosparse.pipeline.state.rules import (
    Rule,
    Seen,
    Unexplained,
    find,
    not_sent,
    trained,
    unexplained,
)
from lightning_axosparse.pipeline.state.values import copied, same, size_of
from lightning_axosparse.support.torch_internals import (
    tree_map_only,
    without_dispatch_modes,
)

_SHIFT = 1e-3
"""By how much values are moved, relative to themselves, times normal random numbers."""


@dataclass
class Rehearsal:
    """What the dry runs of a batch on this rank have in common: its samples, and what is put back.

    Attributes:
        module: the module.
        parameters: those of this rank by which losses are differentiated, where they are trained.
        samples: of the batch.
        trains: whether the step returns a loss.
        device: of this rank.
        measures: whether the memory of each micro-batch is measured.
        numbers: the random numbers of each stage of this rank.
        begins: per stage, what each micro-batch finds changed on the module when it begins.
        shifts: what moves each value that the last stage has received by a little; None where they
            are as they are.
        slopes: by how much the batch's loss changes with the numbers that each micro-batch's was
            computed from, where these are differentiated; None where the losses are.
        differentiates: whether the last stage differentiates the losses.
        state: of the module, before the runs.
    """

    module: nn.Module
    parameters: Sequence[nn.Parameter]
    samples: int
    trains: bool
    device: torch.device
    measures: bool = False
    numbers: dict[int, RandomNumbers] = field(default_factory=dict)
    begins: Mapping[int, Mapping[Place, Any]] = field(default_factory=dict)
    shifts: RandomNumbers | None = None
    slopes: Sequence[Sequence[Tensor]] | None = None

    def __post_init__(self) -> None:
        self.parameters = [each for each in self.parameters if each.requires_grad]
        self.differentiates = self.trains
        self.state = ModuleState(self.module)

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Have BatchNorms, dropout and RReLU in evaluation mode inside the context."""
        still = [
            part
            for part in self.module.modules()
            if isinstance(part, (Norm, _DropoutNd, nn.RReLU)) and part.training
        ]
        lacking = [part for part in still if isinstance(part, Norm) and part.running_mean is None]
        for part in still:
            part.training = False
        for norm in lacking:
            norm.running_mean, norm.running_var = _no_statistics(norm, self.device)
        try:
            yield
        finally:
            for part in still:
                part.training = True
            for norm in lacking:
                norm.running_mean = norm.running_var = None

    @contextmanager
    def shifted(self) -> Iterator[None]:
        """Move what the last stage receives by a little inside the context, alike in all runs."""
        self.shifts = RandomNumbers()
        try:
            yield
        finally:
            self.shifts = None


def _no_statistics(norm: Norm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Statistics with which a norm that has no running ones leaves its input as it is."""
    dtype = torch.get_default_dtype() if norm.weight is None else norm.weight.dtype
    zeros = torch.zeros(norm.num_features, dtype=dtype, device=device)
    return zeros, zeros + 1


@dataclass
class DryRun:
    """What a stage's forward passes of one run have shown.

    Attributes:
        losses: how the loss of each micro-batch was computed, on the last stage of a training step.
        gradients: of each loss, by what the last stage received.
        slopes: of each loss, along one random direction of each parameter of the last stage: a
            number says whether gradients are alike, and takes no memory.
        outputs: what the step returned for each micro-batch, on the last stage.
        changes: what each micro-batch has changed on the module.
        written: what each has written to, even if it is equal afterwards.
        drawn: the states of Python's and NumPy's generators after each micro-batch.
        peaks: the most bytes that each micro-batch took, if that was measured.
        failure: why the run has ended early; None if it has not.
    """

    losses: list[Term] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    slopes: list[list[Tensor | None]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    changes: list[Mapping[Place, Any]] = field(default_factory=list)
    written: list[set[Place]] = field(default_factory=list)
    drawn: list[Any] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    failure: str | None = None


class Recomputed(StepState):
    """Lets layers that are computed again in a dry run read what they have read before."""

    def remember(self, layer: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """Remember the state of a layer, as :class:`StepState` says."""
        return partial(_with_state, ModuleState(layer), layer)


@contextmanager
def _with_state(state: ModuleState, layer: nn.Module) -> Iterator[None]:
    """Give a layer an earlier state inside the context."""
    now = ModuleState(layer)
    state.rewind()
    try:
        yield
    finally:
        now.rewind()


class DryStep(StageStep):
    """The forward passes of one stage in a dry run.

    Attributes:
        run: what has been seen.
    """

    def __init__(self, *shared: Any, rehearsal: Rehearsal) -> None:
        super().__init__(*shared)
        self.run = DryRun(outputs=self.outputs)
        self._rehearsal = rehearsal
        self._numbers = rehearsal.numbers.setdefault(self._stage, RandomNumbers())
        self._differentiates = self._is_last and rehearsal.differentiates
        self._tracks = self._is_last
        self._keeps_sources = rehearsal.slopes is not None
        self._samples = 0
        self._received: list[Tensor] = []

    def forward(self, microbatch: int, received: Activation | None) -> Any:
        """Run the step as :meth:`StageStep.forward` does, and tell other stages if it fails."""
        if received is not None and received.has_failed:
            self.run.failure = "an error on an earlier stage"
        elif self.run.failure is None:
            try:
                return super().forward(microbatch, self._differentiable(microbatch, received))
            except Exception as error:
                self.run.failure = f"{type(error).__name__}: {error}"
        return Activation(has_failed=True)

    def _differentiable(self, microbatch: int, received: Activation | None) -> Activation | None:
        """What the last stage has received, by which its loss can be differentiated."""
        if received is None or not self._differentiates:
            return received
        shifts, end = self._rehearsal.shifts, self._samples
        end += self._batch.microbatches[microbatch].size

        def leaf(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor = tensor.detach()
                if shifts is not None:
                    tensor = tensor * (1 + _SHIFT * torch.randn_like(tensor))
                self._received.append(tensor.requires_grad_())
            return tensor

        self._received = []
        with ExitStack() as stack:
            if shifts is not None:
                stack.enter_context(self._rng.generators_restored())
                samples = self._rehearsal.samples
                stack.enter_context(shifts.of_samples(self._samples, end, samples))
            made: Activation = tree_map_only(Tensor, leaf, received)
        return made

    @contextmanager
    def _forward_context(self, microbatch: int, received: Activation | None) -> Iterator[None]:
        rehearsal, part = self._rehearsal, self._batch.microbatches[microbatch]
        first, self._samples = self._samples, self._samples + part.size
        with ExitStack() as stack:
            stack.callback(lambda: self.run.changes.append(rehearsal.state.rewind()))
            self.run.written.append(stack.enter_context(rehearsal.state.watched()))
            for place, value in rehearsal.begins.get(self._stage, {}).items():
                write(rehearsal.module, place, copied(value, objects=True))
            stack.enter_context(rehearsal.modes())
            stack.enter_context(self._rng.generators_restored())
            stack.enter_context(torch.set_grad_enabled(self._differentiates))
            if rehearsal.measures:
                peak = stack.enter_context(peak_bytes(rehearsal.device))
                stack.callback(lambda: self.run.peaks.append(peak()))
            with self._numbers.of_samples(first, self._samples, rehearsal.samples):
                yield
            self.run.drawn.append((random.getstate(), pickle.dumps(np.random.get_state())))

    def _take_output(self, output: Any) -> None:
        super()._take_output(output)
        if self._rehearsal.trains:
            loss: Tensor | None = loss_of(output)
            term, slopes = self._tracker.of(loss), self._rehearsal.slopes
            if slopes is not None:
                loss = along(self._tracker.sources(term), slopes[len(self.run.losses)])
            self.run.losses.append(term)
            self._differentiate(loss)

    def _differentiate(self, loss: Tensor | None) -> None:
        parameters = self._rehearsal.parameters if self._differentiates else []
        sources = [*self._received, *parameters]
        found: Sequence[Tensor | None] = [None] * len(sources) if loss is None else []
        if sources and loss is not None and loss.requires_grad:
            found = torch.autograd.grad(loss.sum(), sources, allow_unused=True)
        received = len(self._received)
        self.run.gradients.append(list(found[:received]))
        self.run.slopes.append([_slope(each, n) for n, each in enumerate(found[received:])])


def _slope(gradient: Tensor | None, number: int) -> Tensor | None:
    """The product of a gradient with a random direction that belongs to its number."""
    if gradient is None:
        return None
    with without_dispatch_modes():  # These numbers are not the step's.
        generator = torch.Generator(gradient.device).manual_seed(number)
        direction = torch.empty_like(gradient).normal_(generator=generator)
        return (gradient * direction).sum().detach()


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
