"""Compares layer outputs and losses of a whole batch with those of its micro-batches.

The step runs on the whole batch and on its micro-batches, and all changes are undone. Layer outputs
have to be equal after joining: else a layer uses statistics of the batch. It is an error if loss
and gradients of the batch do not follow from micro-batches as a declared ``loss=`` says.

All modules are in training mode, except BatchNorms of layers, whose statistics differ by design,
and dropout of layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_axosparse.distributed.process_groups import all_gather
from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.by_parts import LossWeights, Reduction
from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    Message,
    SidePlace,
    detached_message,
)
from lightning_axosparse.pipeline.crossing.placeholder import UnsentValueError
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.joining import (
    SampleLayout,
    SampleLayouts,
    difference,
    layer_of,
    learn,
    sent_tensors,
)
from lightning_axosparse.pipeline.microbatch import MicroBatch, Norm
from lightning_axosparse.pipeline.profile import peak_bytes
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.pipeline.rng import ComparedNumbers, DrawnSamples
from lightning_axosparse.pipeline.stage_step import StageStep, loss_of
from lightning_axosparse.pipeline.state.layer_state import depends_on_samples
from lightning_axosparse.pipeline.state.module_state import AttributePath, ModuleState
from lightning_axosparse.pipeline.state.values import MISSING, copied, same
from lightning_axosparse.pipeline.step_end import StepEnd
from lightning_axosparse.strategy.step.open_pipeline import OpenPipeline
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.trace import clock

_Changes: TypeAlias = dict[int, list[Mapping[AttributePath, Any]]]
"""The attributes of layers that each pass changes, with their new values, by stage."""


class ComparisonResult(NamedTuple):
    """The result of a comparison; can be pickled.

    Attributes:
        problem: why the runs could not be compared; empty if they could.
        is_too_large: whether that is so as the batch does not fit into memory at once.
        layers: the first stage whose output differs for the batch, which layer gives it in words,
            and the relative difference; None if none differs.
        is_unjoined: whether outputs of the last stage have other shapes for the batch, so that none
            like them were joined.
        layouts: the layouts of samples in the outputs of the last stage.
        draws: whether the step draws random numbers outside the layers.
        guessed_wrong: whether micro-batches got the random numbers of other samples.
        mixes: whether the code before the layers mixes samples, which was not known.
        reads_more: whether nothing else failed than that stages read values that were not sent.
        raises: whether a run raised an error of the user's code.
        reads_others: whether Python reads other numbers between layers of the batch.
        loss: why the loss of the batch does not follow from micro-batches; empty if it does.
        counted: attributes of layers that all micro-batches change to the same, with their stages.
        rewritten: parameters to which every pass writes the same values, such as masked ones.
        warnings: about attributes of layers that micro-batches change to different values.
    """

    problem: str = ""
    layers: tuple[int, str, float] | None = None
    layouts: Mapping[Hashable, Sequence[SampleLayout]] = {}
    draws: bool = False
    guessed_wrong: bool = False
    mixes: bool = False
    reads_more: bool = False
    raises: bool = False
    loss: str = ""
    counted: Sequence[tuple[AttributePath, int]] = ()
    rewritten: Sequence[tuple[AttributePath, int]] = ()
    warnings: Sequence[str] = ()
    is_too_large: bool = False
    reads_others: bool = False
    is_unjoined: bool = False


class _ComparedStep(StageStep):
    """The passes through one stage, whose errors do not end the job."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        self._keeps = True

    def _catches(self, error: Exception) -> bool:
        return True

    def _new_run(self, microbatch: int, received: Message) -> StepRun:
        run = super()._new_run(microbatch, received)
        # Python's and NumPy's generators give the batch and all micro-batches the same numbers.
        run.seed_layers = partial(self._seed_layers, 0)
        return run


class Comparison:
    """Compares a step on a batch with the same step on the batch's micro-batches.

    Args:
        run: the pipeline of the run.
        step: the batch.
        tolerance: largest relative difference of values that count as equal.
        drawn: where samples lie in random numbers, by stage; empty to guess.
    """

    def __init__(
        self,
        run: OpenPipeline,
        step: Batch,
        tolerance: float,
        drawn: Mapping[int, Sequence[DrawnSamples]],
    ) -> None:
        self._run, self._tolerance = run, tolerance
        self._module, self._stage_module = run.stage_module.module, run.stage_module
        self._changes: _Changes = {}
        self._rewinds = True
        self._peaks: dict[int, int] = {}
        """Peak of the bytes that the first pass through each stage allocates."""
        self._states: dict[int, ModuleState] = {}
        stages = (*self._stage_module.stages, self._stage_module.layers.end)
        size, device = step.whole.size, self._stage_module.device
        self._numbers = {
            stage: ComparedNumbers(size, device, drawn.get(stage, ())) for stage in stages
        }
        self._step = replace(step, numbers=self._numbers)

    def compare(
        self, free: Callable[[], int], reduction: Reduction | None, with_graph: bool = False
    ) -> ComparisonResult:
        """Compare; collective over the pipeline.

        Args:
            free: returns the bytes that this rank may still allocate.
            reduction: how the user says that the loss of the batch follows from its samples; None
                not to compare losses.
            with_graph: whether autograd records the runs, as the step may need it.
        """
        stage_module, step = self._stage_module, self._step
        group, first = stage_module.groups.whole, step.microbatches[:1]
        recorded = torch.set_grad_enabled(with_graph)
        with self._modes(), clock.paused(), recorded, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts, of_parts = self._passed(step.microbatches)
            taken = max(self._peaks.values(), default=0) * step.whole.size / first[0].size
            changes = any(change for passes in of_parts.values() for change in passes)
            fit, change = zip(*all_gather((taken <= free(), changes), group), strict=True)
            if not all(fit):
                text = "the samples of a batch at once would not fit into memory"
                return ComparisonResult(text, is_too_large=True)
            of_again: _Changes = {}
            with patched(self, "_rewinds", False):
                whole, of_whole = self._passed([step.whole])
                if any(change):
                    _, of_again = self._passed(first)
            for state in self._states.values():
                state.rewind()
            result = self._compared(whole, parts, reduction)
            result = result._replace(**_changed(of_again, of_whole, of_parts))
            if stage_module.runs_last_stage and reduction is not None and not result.problem:
                activations = parts[stage_module.last_stage]
                result = self._with_loss(result, activations, reduction)
            guessed = any(numbers.guessed_wrong for numbers in self._numbers.values())
            result = result._replace(draws=self._draws, guessed_wrong=guessed)
        return _together(all_gather(result, group))

    def _passed(self, parts: Sequence[MicroBatch]) -> tuple[dict[int, list[Activation]], _Changes]:
        """Run forward passes; return the activations of stages, and the changes of their layers."""
        self._changes = {}
        step = replace(self._step, microbatches=parts, of_pass=self._recorded)
        steps = self._run.pipeline.forward(step, _ComparedStep)
        return {stage: each.activations for stage, each in steps.items()}, self._changes

    @contextmanager
    def _recorded(self, stage: int | None) -> Iterator[None]:
        """Record the changes that a pass through a stage makes to its layers, and undo them."""
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
                    changes = {path: copied(value) for path, (_, value) in state.changes().items()}
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
            finally:  # ``StageEdge`` ends the pass.
                self._peaks[stage] = peak()

    def _compared(
        self,
        whole: Mapping[int, list[Activation]],
        parts: Mapping[int, list[Activation]],
        reduction: Reduction | None,
    ) -> ComparisonResult:
        """Compare the activations of the stages of this rank."""
        stage_module, sizes = self._stage_module, self._step.sizes
        layers: tuple[int, str, float] | None = None
        layouts: Mapping[Hashable, Sequence[SampleLayout]] = {}
        is_unjoined = False
        for stage in stage_module.stages:
            failed = {each.failed for each in (*whole[stage], *parts[stage])} - {None}
            if failed:
                text = "a run raised " + ", ".join(
                    dict.fromkeys(self._step.failures or ["an error"])
                )
                reads_more, mixes = failed == {Rerun.READS}, Rerun.MIXES in failed
                raises = Rerun.FAILS in failed
                return ComparisonResult(text, reads_more=reads_more, mixes=mixes, raises=raises)
            numbers = whole[stage][0].numbers
            # By parts, no end of the step compares them in each batch.
            if reduction is None and any(each.numbers != numbers for each in parts[stage]):
                text = "Python reads other numbers from values between layers"
                return ComparisonResult(text, reads_others=True)
            known, differences = learn(whole[stage][0], parts[stage], sizes, self._tolerance)
            worst = [(key, by) for key, by in differences if not by <= self._tolerance]
            if worst and layers is None:
                key, by = worst[0]
                layers = stage, self._gives(stage, key), by
            if stage == stage_module.last_stage:
                layouts = known
                is_unjoined = any(by == float("inf") for _, by in worst)
        return ComparisonResult(layers=layers, layouts=layouts, is_unjoined=is_unjoined)

    def _gives(self, stage: int, key: Any) -> str:
        """Return in words which layer of a stage, or of those before it, gives or sets a value."""
        names, part = self._stage_module.layers.names, self._stage_module.layers.part(stage)
        index, place = layer_of(key), key[0]
        if isinstance(place, SidePlace) and place.of_attribute:
            return f"layer {names[index]!r} sets {place.name!r} to"
        if index >= 0 or len(part) == 1:
            return f"layer {names[max(index, part[0])]!r} gives"
        return f"one of the layers {names[part[0]]!r} to {names[part[-1]]!r} gives"

    @property
    def drawn(self) -> dict[int, Sequence[DrawnSamples]]:
        """Where samples lie in the random numbers of the stages of this rank."""
        return {stage: numbers.drawn for stage, numbers in self._numbers.items()}

    @property
    def drawn_outside(self) -> Sequence[DrawnSamples]:
        """The same, of numbers that are drawn outside the layers."""
        return max((each.drawn_outside for each in self._numbers.values()), key=len)

    @property
    def _draws(self) -> bool:
        return any(numbers.draws_outside for numbers in self._numbers.values())

    def _with_loss(
        self, result: ComparisonResult, activations: Sequence[Activation], reduction: Reduction
    ) -> ComparisonResult:
        """Compare losses and their gradients, on the last stage."""
        layouts = SampleLayouts({**self._step.layouts.known, **result.layouts})
        step = replace(self._step, layouts=layouts, of_pass=self._recorded)
        weights = LossWeights(reduction, step.microbatches)
        try:
            with torch.enable_grad():
                return result._replace(loss=self._loss_problem(step, activations, weights))
        except RunAgain:  # Another batch may tell.
            return result
        except Exception as error:
            text = f"its end, run on a micro-batch, raises {type(error).__name__}: {error}"
            return result._replace(loss=text, reads_more=isinstance(error, UnsentValueError))

    def _loss_problem(
        self, step: Batch, activations: Sequence[Activation], weights: LossWeights
    ) -> str:
        """Return why the loss of the batch does not follow from micro-batches; empty if it does.

        Args:
            step: the batch.
            activations: the layer outputs of its micro-batches.
            weights: the weights of their losses.
        """
        effects, end = self._run.effects, StepEnd(step)
        messages = [_differentiable(activation) for activation in activations]
        joined = end.join([message.content for message in messages])
        with effects.discarded():
            loss = loss_of(end.rehearse(step.whole, Message(joined[0], joined[1])))
        if self._run.metrics.touched and not loss.isfinite().all():
            return "it is computed from the value of a metric"
        expected = joined.split(_gradients(loss, joined.tensors))
        losses, gradients = list[Tensor](), list[Sequence[Tensor | None]]()
        for index, (part, message) in enumerate(zip(step.microbatches, messages, strict=True)):
            with effects.discarded():
                part_loss = loss_of(end.rehearse(part, message))
            losses.append(part_loss.detach())
            weighted = part_loss * weights.of[index]
            gradients.append(_gradients(weighted, sent_tensors(message.content)))
        combined, of_parts = weights.combined(losses), zip(*gradients, strict=True)
        worst = max(map(_apart, expected, of_parts), default=0.0)
        # Gradients are differences themselves.
        if max(difference(combined, loss.detach()), worst / 10) <= self._tolerance:
            return ""
        apart = f", and gradients that differ by {worst:.1%}" if worst else ""
        return f"micro-batches give {float(combined):.6g}, the batch {float(loss):.6g}{apart}"

    @contextmanager
    def _modes(self) -> Iterator[None]:
        """Set BatchNorms, dropout and RReLU of layers to evaluation mode in the context."""
        inside = {part for layer in self._stage_module.layers.layers for part in layer.modules()}
        still = [
            part
            for part in inside
            if isinstance(part, Norm | _DropoutNd | nn.RReLU) and part.training
        ]
        # These use statistics of the batch in evaluation mode, too.
        lacking = [part for part in inside if isinstance(part, Norm) and part.running_mean is None]
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
            self._run.effects.begin_batch()  # Runs are to return to these modes.
            yield


def _no_statistics(norm: Norm, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean 0 and variance 1, for a norm without running statistics."""
    dtype = torch.get_default_dtype() if norm.weight is None else norm.weight.dtype
    zeros = torch.zeros(norm.num_features, dtype=dtype, device=device)
    return zeros, zeros + 1


def _largest(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.abs().max())


def _apart(whole: Sequence[Tensor | None], parts: Sequence[Tensor | None]) -> float:
    """Return the largest difference of a tensor's gradients, relative to the largest entry.

    Args:
        whole: those of the batch's loss, for each micro-batch.
        parts: those of the losses of micro-batches.
    """
    scale = max(map(_largest, whole))
    pairs = [(a, b) for a, b in zip(whole, parts, strict=True) if a is not None and b is not None]
    return max((_largest(a - b) / scale for a, b in pairs if scale), default=0.0)


def _gradients(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not (wanted and loss.requires_grad):
        return [None] * len(tensors)
    gradients = iter(torch.autograd.grad(loss.sum(), wanted, allow_unused=True))
    return [next(gradients) if tensor.requires_grad else None for tensor in tensors]


def _differentiable(activation: Activation) -> Message:
    """Make the tensors of an activation leaves, as the end of the step gets them in training."""
    message = detached_message(activation)[1]
    for tensor in message.tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.requires_grad_()
    return message


def _changed(again: _Changes, whole: _Changes, parts: _Changes) -> dict[str, Any]:
    """Return the state that micro-batches change on layers, as fields of the result.

    An attribute that gets the same value whatever it was before, such as an auxiliary loss or a
    masked weight, is no state.

    Args:
        again: changes by the first micro-batch, after the whole batch.
        whole: changes by the whole batch.
        parts: changes by each micro-batch, each from the same state.
    """
    counted, rewritten = list[tuple[AttributePath, int]](), list[tuple[AttributePath, int]]()
    warned = list[str]()
    before, after, of_whole = map(_merged, (parts, again, whole))
    for stage, of_parts in parts.items():
        paths = dict.fromkeys(path for changes in of_parts for path in changes)
        for path in paths:
            values = [changes.get(path, MISSING) for changes in of_parts]
            if same(before.get(path, MISSING), after.get(path, MISSING)):
                if isinstance(values[0], nn.Parameter):
                    rewritten.append((path, stage))
                continue
            is_counted = all(same(value, of_whole.get(path, MISSING)) for value in values)
            if is_counted and not isinstance(values[0], nn.Parameter):
                counted.append((path, stage))
            elif not _adds_up(values, of_whole.get(path, MISSING), after.get(path, MISSING)):
                warned.append(depends_on_samples(path))
    return {"counted": counted, "rewritten": rewritten, "warnings": warned}


def _adds_up(parts: Sequence[Any], whole: Any, again: Any) -> bool:
    """Return whether micro-batches, one after the other, change a tensor as the whole batch does.

    A count of tokens adds up. Of four tokens that were counted before, two micro-batches of three
    and five make 7 and 9 each, and 12 together, as the whole batch does; the first one again
    makes 15.

    Args:
        parts: values after each micro-batch, each from the same value.
        whole: the value after the whole batch, from that value, too.
        again: the value after the first micro-batch, from ``whole``.
    """
    values = (whole, again, *parts)
    if not all(isinstance(each, Tensor) and each.dtype != torch.bool for each in values):
        return False
    if any(each.shape != whole.shape for each in values):
        return False
    before = parts[0] - (again - whole)
    together = before + sum(part - before for part in parts)
    return bool(torch.isclose(together.double(), whole.double(), equal_nan=True).all())


def _merged(changes: _Changes) -> dict[AttributePath, Any]:
    """Return the changes of the first pass through each stage."""
    return {path: value for each in changes.values() for path, value in each[0].items()}


def _together(results: Sequence[ComparisonResult]) -> ComparisonResult:
    """Combine the results of all ranks of a pipeline."""
    problem = next((each.problem for each in results if each.problem), "")
    layers = min((each.layers for each in results if each.layers is not None), default=None)
    if any(each.reads_others for each in results):
        layers = None  # The batch runs undivided.
    failed = [each for each in results if each.problem or each.loss]
    return ComparisonResult(
        problem,
        layers,
        {key: layout for each in results for key, layout in each.layouts.items()},
        any(each.draws for each in results),
        any(each.guessed_wrong for each in results),
        any(each.mixes for each in results),
        bool(failed) and all(each.reads_more for each in failed),
        any(each.raises for each in results),
        next((each.loss for each in results if each.loss), ""),
        [attribute for each in results for attribute in each.counted],
        [attribute for each in results for attribute in each.rewritten],
        list(dict.fromkeys(text for each in results for text in each.warnings)),
        is_unjoined=any(each.is_unjoined for each in results),
    )
