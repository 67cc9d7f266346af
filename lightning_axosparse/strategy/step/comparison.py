"""Compares what layers and losses make of a whole batch with what they make of micro-batches.

The step runs on the whole batch and on its micro-batches, without a trace. Layers have to give the
same, and propagate gradients alike: one that uses statistics of the batch is an error. Where the
losses of micro-batches, their gradients and what they log make up those of the batch, it may be
differentiated by parts.

Modules train as usual, but for BatchNorms, whose statistics are known to differ, and for dropout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.crossing.message import Activation, Message, relink
from lightning_axosparse.pipeline.engine import KeepingStep
from lightning_axosparse.pipeline.joining import Layout, Layouts, layer_of, learn, sent_tensors
from lightning_axosparse.pipeline.loss.by_parts import FollowedLosses
from lightning_axosparse.pipeline.loss.operators import UNKNOWN
from lightning_axosparse.pipeline.loss.separable import SampleTracker
from lightning_axosparse.pipeline.microbatch import MicroBatch, Norm
from lightning_axosparse.pipeline.profile import peak_bytes
from lightning_axosparse.pipeline.rng import ComparedNumbers
from lightning_axosparse.pipeline.stage_step import Batch, loss_of
from lightning_axosparse.pipeline.state.layer_state import depends_on_samples
from lightning_axosparse.pipeline.state.module_state import AttributePath, ModuleState
from lightning_axosparse.pipeline.state.values import MISSING, copied, same
from lightning_axosparse.pipeline.step_end import StepEnd
from lightning_axosparse.strategy.compat.logging import alike
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.trace import clock

_Changes: TypeAlias = dict[int, list[Mapping[AttributePath, Any]]]
"""What passes change on layers, by stage."""


class Found(NamedTuple):
    """What a comparison has shown; can be pickled.

    Attributes:
        problem: why there was nothing to compare; empty if there was.
        is_too_large: whether that is because the batch does not fit into memory.
        layers: the first stage that gives something else for the batch, its layer in words, and by
            how much.
        layouts: how tensors lie, on the last stage.
        draws: whether the step draws random numbers outside the layers.
        reason: why losses do not make up that of the batch; empty if they do.
        has_others: whether the step does something else than to log means and return a loss.
        functions: hashes of the functions that the steps of micro-batches have called.
        counted: attributes of layers that all micro-batches change alike, with their stages.
        rewritten: parameters that passes set to the same each time, such as masked ones.
        warnings: of attributes of layers that they do not.
    """

    problem: str = ""
    is_too_large: bool = False
    layers: tuple[int, str, float] | None = None
    layouts: Mapping[Hashable, Layout] = {}
    draws: bool = False
    reason: str = ""
    has_others: bool = False
    functions: Collection[int] = ()
    counted: Sequence[tuple[AttributePath, int]] = ()
    rewritten: Sequence[tuple[AttributePath, int]] = ()
    warnings: Sequence[str] = ()


class _ComparedStep(KeepingStep):
    """Passes through one stage that fail without an end of the job."""

    def forward(self, microbatch: int, received: Message | None) -> Activation:
        """Run the user's step; where it fails, or has failed before, the next stages do nothing."""
        if received is None or not received.content.has_failed:
            try:
                return super().forward(microbatch, received)
            except Exception as error:
                self.batch.failures.append(f"{type(error).__name__}: {error}")
        self.activations.append(Activation(has_failed=True))
        return self.activations[-1]


class Comparison:
    """Compares a step on a batch with the same step on the batch's micro-batches.

    Args:
        run: what steps have in common.
        step: the batch.
        tolerance: largest relative difference of equal values.
    """

    def __init__(self, run: OpenPipeline, step: Batch, tolerance: float) -> None:
        self._run, self._tolerance = run, tolerance
        self._module, self._stage_module = run.stage_module.module, run.stage_module
        self._changes: _Changes = {}
        self._rewinds = True
        self._peaks: dict[int, int] = {}
        """Most bytes that the first pass through each stage takes at a time."""
        self._states: dict[int, ModuleState] = {}
        stages = (*self._stage_module.stages, self._stage_module.layers.end)
        self._numbers = {stage: ComparedNumbers(step.whole.size) for stage in stages}
        self._step = replace(step, numbers=self._numbers, of_pass=self._noted)

    def find(self, free: Callable[[], int], may_part: bool) -> Found:
        """Compare; collective over the pipeline.

        Args:
            free: returns the bytes that this rank may still take.
            may_part: whether the loss may be differentiated by parts, if it can.
        """
        stage_module, step = self._stage_module, self._step
        group, first = stage_module.groups.whole, step.microbatches[:1]
        with self._modes(), clock.paused(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts, of_parts = self._passed(step.microbatches)
            taken = max(self._peaks.values(), default=0) * step.whole.size / first[0].size
            changes = any(change for passes in of_parts.values() for change in passes)
            fit, change = zip(*all_gather((taken <= free(), changes), group), strict=True)
            if not all(fit):
                text = f"its {step.whole.size} samples at once would not fit into memory"
                return Found(text, is_too_large=True)
            of_again: _Changes = {}
            with patched(self, "_rewinds", False):
                whole, of_whole = self._passed([step.whole])
                if any(change):
                    _, of_again = self._passed(first)
            for state in self._states.values():
                state.rewind()
            found = self._compared(whole, parts)
            found = found._replace(**_changed(of_again, of_whole, of_parts))
            if stage_module.runs_last_stage and may_part and not found.problem:
                found = self._with_losses(found, parts[stage_module.last_stage])
            found = found._replace(draws=self._draws)
        return _together(all_gather(found, group))

    def _passed(self, parts: Sequence[MicroBatch]) -> tuple[dict[int, list[Activation]], _Changes]:
        """Run forward passes; return what stages give, and what their layers change."""
        self._changes = {}
        step = replace(self._step, microbatches=parts)
        steps = self._run.pipeline.forward(step, _ComparedStep)
        return {stage: each.activations for stage, each in steps.items()}, self._changes

    @contextmanager
    def _noted(self, stage: int | None) -> Iterator[None]:
        """Note what a pass through a stage changes on its layers, and put it back."""
        stages = self._stage_module.stages
        with self._run.layers_rewound([each for each in stages if each != stage]):
            if stage is None:
                yield
                return
            state = self._states[stage]
            with state.writes():
                try:
                    with self._measured(stage):
                        yield
                finally:
                    changes = {
                        place: copied(value) for place, (_, value) in state.changes().items()
                    }
                    self._changes.setdefault(stage, []).append(changes)
                    if self._rewinds:
                        state.rewind()

    @contextmanager
    def _measured(self, stage: int) -> Iterator[None]:
        if stage in self._peaks:
            yield
            return
        with peak_bytes(self._stage_module.device) as peak:
            try:
                yield
            finally:  # The edge of a stage is raised.
                self._peaks[stage] = peak()

    def _compared(
        self, whole: Mapping[int, list[Activation]], parts: Mapping[int, list[Activation]]
    ) -> Found:
        """Compare what the stages of this rank give."""
        stage_module, sizes = self._stage_module, self._step.sizes
        layers: tuple[int, str, float] | None = None
        layouts: Mapping[Hashable, Layout] = {}
        for stage in stage_module.stages:
            if any(each.has_failed for each in (*whole[stage], *parts[stage])):
                return Found("a run raised " + ", ".join(self._step.failures or ["an error"]))
            known, differences = learn(whole[stage][0], parts[stage], sizes, self._difference)
            worst = [(key, by) for key, by in differences if not by <= self._tolerance]
            if worst and layers is None:
                key, by = worst[0]
                layers = stage, self._named(stage, layer_of(key)), by
            if stage == stage_module.last_stage:
                layouts = known
        return Found(layers=layers, layouts=layouts)

    def _named(self, stage: int, index: int) -> str:
        """A layer in words; with -1 the last one of a stage, or one before it."""
        names, part = self._stage_module.layers.names, self._stage_module.layers.part(stage)
        if index >= 0 or len(part) == 1:
            return f"layer {names[max(index, part[0])]!r}"
        return f"one of the layers {names[part[0]]!r} to {names[part[-1]]!r}"

    @property
    def _draws(self) -> bool:
        return any(numbers.draws_outside for numbers in self._numbers.values())

    def _difference(self, one: Tensor, other: Tensor) -> float:
        """How much two tensors differ, relative to the largest entry."""
        if not (one.is_floating_point() or one.is_complex()):
            return float((one != other).double().mean()) if one.numel() else 0.0
        one, other = one.to(torch.promote_types(one.dtype, torch.float32)), other.to(one.dtype)
        if not bool(other.isfinite().all()):
            return float(not torch.equal(one.nan_to_num(), other.nan_to_num()))
        scale = float(other.abs().max()) if other.numel() else 0.0
        return float((one - other).abs().max()) / scale if scale else float(one.any())

    def _with_losses(self, found: Found, activations: Sequence[Activation]) -> Found:
        """Compare the losses, their gradients and what is logged, on the last stage."""
        step, effects = self._step, self._run.effects
        step = replace(step, layouts=Layouts({**step.layouts.known, **found.layouts}))
        end = StepEnd(step, self._stage_module.layers, self._run.rng)
        tracker = SampleTracker(effects.constants)
        followed = FollowedLosses(step, tracker, self._stage_module.layers.end)
        messages = [_differentiable(activation) for activation in activations]
        gradients, has_others = list[Sequence[Tensor | None]](), False
        try:
            with torch.enable_grad():
                joined = end.join([message.content for message in messages])
                with effects.of_part(lambda value: UNKNOWN):
                    loss = loss_of(end.rehearse(step.whole, Message(joined[0], joined[1])))
                logged, effects.parts = effects.parts[0], []
                expected = _gradients(loss, joined.tensors)
                for part, message in zip(step.microbatches, messages, strict=True):
                    with effects.of_part(tracker.note_of):
                        output = end.rehearse(part, message, [tracker], followed=followed)
                    followed.add(output, part)
                    has_others |= effects.part_has_others(output)
                    gradients.append(_gradients(loss_of(output), sent_tensors(message.content)))
        except Exception as error:
            text = f"its end, run on a micro-batch, raises {type(error).__name__}: {error}"
            return found._replace(reason=text)
        calls = effects.combined(step.sizes)
        has_others |= (
            calls is None
            or self._draws
            or not alike(calls, logged, self._difference, self._tolerance)
        )
        found = found._replace(has_others=has_others, functions=followed.functions)
        weights = followed.weights
        if weights.problem:
            return found._replace(reason=weights.problem)
        combined = weights.combined([each.detach() for each in followed.losses])
        difference = self._difference(combined, loss.detach())
        final = [weights.weight(n) * weights.factor() for n in range(len(gradients))]
        for index, whole in enumerate(joined.split(expected, step.sizes)):
            scale = max(map(_largest, whole))
            for mine, of_part, weight in zip(whole, gradients, final, strict=True):
                theirs = of_part[index]
                if scale and mine is not None and theirs is not None:
                    apart = _largest(mine - theirs * weight) / scale
                    difference = max(difference, apart / 10)  # They are differences themselves.
        if not difference <= self._tolerance:
            return found._replace(
                reason=f"micro-batches give {float(combined):.6g}, the batch {float(loss):.6g}, or "
                f"gradients that differ by {difference:.1%}"
            )
        return found

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Have BatchNorms, dropout and RReLU in evaluation mode inside the context."""
        still = [
            part
            for part in self._module.modules()
            if isinstance(part, (Norm, _DropoutNd, nn.RReLU)) and part.training
        ]
        lacking = [part for part in still if isinstance(part, Norm) and part.running_mean is None]
        for part in still:
            part.training = False
        for norm in lacking:
            norm.running_mean, norm.running_var = _no_statistics(norm, self._stage_module.device)
        with ExitStack() as stack:
            for norm in lacking:
                stack.callback(vars(norm)["_buffers"].update, running_mean=None, running_var=None)
            for part in still:
                stack.callback(setattr, part, "training", True)
            stages = self._stage_module.stages
            self._states = {stage: self._run.state_of_layers([stage]) for stage in stages}
            yield


def _no_statistics(norm: Norm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Statistics with which a norm that has no running ones leaves its input as it is."""
    dtype = torch.get_default_dtype() if norm.weight is None else norm.weight.dtype
    zeros = torch.zeros(norm.num_features, dtype=dtype, device=device)
    return zeros, zeros + 1


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _gradients(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not (wanted and loss.requires_grad):
        return [None] * len(tensors)
    found = iter(torch.autograd.grad(loss.sum(), wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def _differentiable(activation: Activation) -> Message:
    """What a layer gives, as the end of the step gets it in training."""
    message = relink(activation)[1]
    for tensor in message.tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.requires_grad_()
    return message


def _changed(again: _Changes, whole: _Changes, parts: _Changes) -> dict[str, Any]:
    """What micro-batches change on layers.

    What becomes the same from whatever it was before, such as an auxiliary loss or a masked weight,
    is no state.

    Args:
        again: by the first micro-batch, after the whole batch.
        whole: by the whole batch.
        parts: by each micro-batch, from the same state.
    """
    counted, rewritten = list[tuple[AttributePath, int]](), list[tuple[AttributePath, int]]()
    warned = list[str]()
    before, after, of_whole = map(_merged, (parts, again, whole))
    for stage, of_parts in parts.items():
        places = dict.fromkeys(place for changes in of_parts for place in changes)
        for place in places:
            values = [changes.get(place, MISSING) for changes in of_parts]
            if same(before.get(place, MISSING), after.get(place, MISSING)):
                if isinstance(values[0], nn.Parameter):
                    rewritten.append((place, stage))
                continue
            is_counted = all(same(value, of_whole.get(place, MISSING)) for value in values)
            if is_counted and not isinstance(values[0], nn.Parameter):
                counted.append((place, stage))
            else:
                warned.append(depends_on_samples(place))
    return {"counted": counted, "rewritten": rewritten, "warnings": warned}


def _merged(changes: _Changes) -> dict[AttributePath, Any]:
    return {place: value for each in changes.values() for place, value in each[0].items()}


def _together(found: Sequence[Found]) -> Found:
    """What the ranks of a pipeline have found, the same on all."""
    problem = next((each.problem for each in found if each.problem), "")
    layers = min((each.layers for each in found if each.layers is not None), default=None)
    return Found(
        problem,
        any(each.is_too_large for each in found),
        layers,
        {key: layout for each in found for key, layout in each.layouts.items()},
        any(each.draws for each in found),
        next((each.reason for each in found if each.reason), ""),
        any(each.has_others for each in found),
        {function for each in found for function in each.functions},
        [place for each in found for place in each.counted],
        [place for each in found for place in each.rewritten],
        list(dict.fromkeys(text for each in found for text in each.warnings)),
    )
