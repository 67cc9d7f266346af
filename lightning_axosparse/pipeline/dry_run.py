"""Runs a step forward without a trace, so that a whole batch and its micro-batches compare.

Modules train as usual, but for BatchNorms, whose statistics are known to differ, and for dropout.
Whatever else the step draws at random, a micro-batch gets the numbers that its samples have in the
whole batch. What the step changes on the module is put back after each micro-batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_axosparse.pipeline.crossing.message import Activation
from lightning_axosparse.pipeline.loss.terms import Term
from lightning_axosparse.pipeline.loss.weights import along
from lightning_axosparse.pipeline.microbatch import Norm
from lightning_axosparse.pipeline.profile import peak_bytes
from lightning_axosparse.pipeline.stage_step import StageStep, loss_of
from lightning_axosparse.pipeline.state.batch_state import StepState
from lightning_axosparse.pipeline.state.module_state import ModuleState, Place, write
from lightning_axosparse.pipeline.state.values import copied
from lightning_axosparse.support.torch_internals import (
    OperatorMode,
    is_random,
    tensors_in,
    tree_leaves,
    tree_map_only,
    without_dispatch_modes,
    writes_beside,
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


class RandomNumbers(OperatorMode):
    """Gives micro-batches the random numbers that their samples have in the whole batch.

    The whole batch has to be computed first.

    Attributes:
        problem: why a micro-batch could not get these numbers; None if it could.
        is_unclear: whether they may belong to other samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem: str | None = None
        self.is_unclear = False
        self._whole: list[Tensor] = []
        self._used, self._bounds = 0, (0, 0, 0)
        self._records = True
        self._given: dict[torch.Generator, Tensor] = {}
        """The states that generators of the user's had before."""

    @contextmanager
    def of_samples(self, first: int, end: int, samples: int) -> Iterator[None]:
        """Draw the numbers of some of the batch's samples inside the context.

        After it, generators that the code has named are in the states in which they were.
        """
        self._records, self._used = end - first == samples, 0
        self._bounds = first, end, samples
        if self._records:
            self._whole = []
        try:
            with self:
                yield
        finally:
            for generator, state in self._given.items():
                generator.set_state(state)
            self._given = {}
        if not self._records and self._used != len(self._whole):
            self.problem = "how often it draws random numbers depends on the samples"

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and give a micro-batch the numbers of its samples if it draws some."""
        if not is_random(func):
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        for generator in given:
            self._given.setdefault(generator, generator.get_state())
        before = self._states(given)
        output = func(*args, **kwargs)
        made = [tensor for tensor in tensors_in(output) if tensor.numel()]
        # A fused function without dropout draws nothing.
        if all(map(torch.equal, before, self._states(given))):
            return output
        if func is torch.ops.aten.native_dropout.default:  # dropout on CUDA; it returns its mask
            self._drawn(func, output[1])
            scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
            torch.mul(args[0], output[1] * scale, out=output[0])
        # One that keeps its numbers for the backward pass has more results than it returns.
        elif len(made) == 1 and not writes_beside(func):
            self._drawn(func, made[0])
        else:
            self.problem = f"{_name(func)} draws random numbers for itself"
        return output

    @staticmethod
    def _states(given: Sequence[torch.Generator]) -> list[Tensor]:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in given)]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states

    def _drawn(self, func: Any, tensor: Tensor) -> None:
        if self._records:
            self._whole.append(tensor.detach().clone())
            return
        whole = self._whole[self._used] if self._used < len(self._whole) else None
        self._used += 1
        first, end, samples = self._bounds
        numbers = None if whole is None else _of_samples(whole, tensor.shape, first, end, samples)
        if whole is None or numbers is None or (numbers is not whole and "randperm" in str(func)):
            self.problem = f"it draws numbers ({_name(func)}) that belong to no single sample"
            return
        # Two views of each sample, or two tokens of each, may be drawn together.
        self.is_unclear |= numbers is not whole and whole.shape.count(samples) != 1
        tensor.detach().copy_(numbers)


def _name(func: Any) -> str:
    return "torch." + str(func).removeprefix("aten.").split(".")[0].strip("_")


def _of_samples(
    whole: Tensor, shape: torch.Size, first: int, end: int, samples: int
) -> Tensor | None:
    """The part of the numbers of a batch that belongs to some samples; None if it is not clear."""
    if whole.shape == shape:
        return whole
    if whole.dim() != len(shape):
        return None
    unlike = [dim for dim, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if a != b]
    (dim, *others) = unlike
    each, rest = divmod(whole.shape[dim], samples)
    if others or rest or shape[dim] != each * (end - first):
        return None
    return whole.narrow(dim, first * each, shape[dim])


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
            self.run.drawn.append((random.getstate(), str(np.random.get_state())))

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
