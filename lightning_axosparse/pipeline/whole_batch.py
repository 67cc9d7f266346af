"""Runs the step on the whole batch: its front, up to the first layer, and its end, behind them.

What the step gives to its first layer comes from one run on the whole batch; each micro-batch gets
its rows of it. So code that mixes samples before the layers (mixup, ``x - x.mean(0)``, a norm) does
what it does on one process, and is differentiated once.

The end of the step is one more stage, without layers and of one micro-batch, on the rank of the
last stage: when the outputs of all micro-batches are there, they are joined, become leaves, and the
user's step runs once on the whole batch with every layer replaced by what it gave. The loss, what
is logged, printed and returned, metrics and attributes are those of one process, because it is the
same call. The gradients of the leaves begin the backward passes of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import copied
from lightning_axosparse.pipeline.crossing.message import Activation, Gradients, Message, Reads
from lightning_axosparse.pipeline.crossing.placeholder import FirstRead, Progress
from lightning_axosparse.pipeline.crossing.skip_tensors import alias_of
from lightning_axosparse.pipeline.joining import (
    Axis,
    Joined,
    axes,
    join,
    sent_tensors,
)
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.stage_forward import FirstInputs, Mode, PipelinedLayers, Visit
from lightning_axosparse.pipeline.stage_step import (
    NOTHING,
    Again,
    Batch,
    StageStep,
    TrainingStageStep,
    loss_of,
)
from lightning_axosparse.support.object_trees import object_leaves, object_map


class FollowedInputs(Protocol):
    """Follows the samples of a micro-batch: ``loss.by_parts.FollowedLosses``."""

    def begin_batch(self, given: Any, part: MicroBatch, received: Activation) -> None:
        """Take in the micro-batch that the step is given, and what it received."""

    def follow_output(self, output: Any) -> None:
        """Take in what the last layer gives."""


class RunAgain(BaseException):
    """Ends a run of which nothing counts, as the batch has to run again."""

    def __init__(self, why: Again) -> None:
        super().__init__(why)
        self.why = why


class _FirstLayer(BaseException):
    """Ends a step where it calls its first layer."""

    def __init__(self, arguments: dict[Any, Any]) -> None:
        super().__init__("the first layer of the pipeline")
        self.arguments = arguments


def _raise_first_layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _FirstLayer(_arguments(args, kwargs))


_Place: TypeAlias = tuple[Hashable, int]
"""Where a tensor is given to the first layer: the argument, and the tensor's number in it."""


class StepFront:
    """What the step gives to its first layer, from a run on the whole batch."""

    def __init__(self, batch: Batch, layers: PipelinedLayers, rng: PipelineRNG) -> None:
        self._batch, self._layers, self._rng = batch, layers, rng
        self._inputs: dict[Hashable, Sequence[Tensor]] = {}
        self._axes: dict[_Place, Axis] = {}
        self._leaves: dict[_Place, list[tuple[MicroBatch, Tensor]]] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        """Run the step up to its first layer; what it raises, the first micro-batch raises."""
        batch = self._batch
        visit = Visit(0, -1, *NOTHING, self._rng, batch.sent(0), Progress(0))
        visit.first_inputs = _raise_first_layer
        self._rng.begin_run(is_whole=True)
        observed = batch.observed(batch.whole, visit)
        try:
            with batch.effects.discarded(), batch.of_pass(None), observed:
                with self._layers.visit(visit), batch.precision():
                    batch.called(copied(batch.whole.batch))
        except _FirstLayer as first:
            self._inputs = {key: object_leaves(v, Tensor) for key, v in first.arguments.items()}
        except Exception as error:
            self._error = error

    def of(self, part: MicroBatch) -> FirstInputs | None:
        """What replaces the inputs of the first layer in the pass of a micro-batch."""
        if self._error is not None:
            raise self._error
        if not self._inputs:
            return None

        def replaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = _arguments(args, kwargs)
            made = {key: self._argument(part, key, value) for key, value in given.items()}
            return tuple(made[n] for n in range(len(args))), {name: made[name] for name in kwargs}

        return replaced

    def _argument(self, part: MicroBatch, key: Hashable, value: Any) -> Any:
        """A micro-batch's part of an argument, or its own one if that has other tensors."""
        own, whole = object_leaves(value, Tensor), self._inputs.get(key, ())
        if len(own) != len(whole):
            return value
        given = iter([self._rows(part, (key, n), whole[n], own[n]) for n in range(len(own))])
        return object_map(Tensor, lambda tensor: next(given), value)

    def _rows(self, part: MicroBatch, place: _Place, whole: Tensor, own: Tensor) -> Tensor:
        """A micro-batch's rows of a tensor; its own one where it is not known which they are."""
        rows = whole.detach()
        if whole.shape != own.shape:  # Else it has no samples, or they are all in this one.
            axis = self._axes.get(place) or self._axis(part, whole, own)
            if axis is None:
                return own
            self._axes[place] = axis
            rows = axis.part(rows, part.begin, part.size)
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return rows
        leaf = rows.detach().requires_grad_()
        self._leaves.setdefault(place, []).append((part, leaf))
        return alias_of(leaf)

    def _axis(self, part: MicroBatch, whole: Tensor, own: Tensor) -> Axis | None:
        """How the samples lie in an input: of several rows a sample, as the values say."""
        samples, size = self._batch.whole.size, part.size
        found = axes(whole.shape, own.shape, samples, size)
        if not found and whole.dim() == own.dim():  # It may be trimmed to the longest sample.
            lengths = enumerate(zip(whole.shape, own.shape, strict=True))
            dims = [dim for dim, (n, few) in lengths if few and n * size == few * samples]
            found = [Axis(dim, whole.shape[dim] // samples) for dim in dims]
        if len(found) == 1:
            return found[0]
        values = ((axis, axis.part(whole.detach(), part.begin, size)) for axis in found)
        own = own.detach()
        return next((axis for axis, rows in values if torch.equal(rows, own)), None)

    def backward(self) -> None:
        """Differentiate what the first layer was given, by the gradients of all micro-batches."""
        outputs, gradients = [], []
        for place, leaves in self._leaves.items():
            (key, number), axis = place, self._axes.get(place)
            whole = self._inputs[key][number]
            gradient = torch.zeros_like(whole)
            found = [(part, leaf.grad) for part, leaf in leaves if leaf.grad is not None]
            for part, own in found:
                if axis is None:
                    gradient += own
                else:
                    axis.add_part(gradient, own, part.begin, part.size)
            if found:
                outputs.append(whole)
                gradients.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """The arguments of a layer by number and name."""
    return {**dict(enumerate(args)), **kwargs}


class StepEnd:
    """The end of the step on the whole batch, with every layer replaced by what it gave."""

    def __init__(self, batch: Batch, layers: PipelinedLayers, rng: PipelineRNG) -> None:
        self._batch, self._layers, self._rng = batch, layers, rng
        self._ended: tuple[Joined, Visit] | None = None
        """What the layers gave to the run that counts, and the run."""

    def join(self, activations: Sequence[Activation]) -> Joined:
        """Join what the layers gave for the micro-batches."""
        names = self._layers.names
        batch = self._batch
        return join(activations, batch.sizes, batch.layouts, names.__getitem__)

    def run(self, activations: Sequence[Activation], may_call_none: bool = False) -> Any:
        """Run the user's step, of which everything counts.

        Returns:
            What it returned.

        Raises:
            RunAgain: if nothing counts.
        """
        if any(each.has_failed for each in activations):
            raise RunAgain("reads")
        batch = self._batch
        joined = self.join(activations)
        visit = self._visit(joined.activation, joined.tensors)
        self._ended = joined, visit
        if not batch.numbers:
            visit.behind_layers = self._check_drawn
        with batch.effects.counted():
            try:
                return self._called(batch.whole, visit, batch.whole.batch, True, may_call_none)
            except FirstRead as error:
                raise RunAgain("reads") from error

    def gradients(self) -> list[list[Tensor | None]]:
        """Those of what the layers gave for each micro-batch, once the loss is differentiated."""
        assert self._ended is not None
        (joined, visit), self._ended = self._ended, None
        visit.validate_placeholders()
        return joined.gradients(self._batch.sizes)

    def _check_drawn(self, output: Any) -> None:
        if self._rng.has_drawn():
            raise RunAgain("draws")

    def rehearse(
        self,
        part: MicroBatch,
        message: Message,
        modes: Sequence[Mode] = (),
        reads: Reads | None = None,
        followed: FollowedInputs | None = None,
    ) -> Any:
        """Run the end of the step on a micro-batch, or the whole batch; return its output.

        Args:
            part: which.
            message: what layers gave.
            modes: observe the step.
            reads: filled with what it reads.
            followed: is told what the step is given.
        """
        visit = self._visit(message.content, message.tensors)
        visit.reads, visit.modes = reads, modes
        given = copied(part.batch)
        if followed is not None:
            followed.begin_batch(given, part, message.content)
            visit.behind_layers = followed.follow_output
        return self._called(part, visit, given, counts=False, may_call_none=True)

    def _called(
        self, part: MicroBatch, visit: Visit, given: Any, counts: bool, may_call_none: bool
    ) -> Any:
        batch = self._batch
        self._rng.begin_run(is_whole=part is batch.whole)
        observed = batch.observed(part, visit, counts)
        with batch.of_pass(None), observed, self._layers.visit(visit), batch.precision():
            output = batch.called(given)
            self._layers.end_step(visit, output, may_call_none)
        return output

    def _visit(self, activation: Activation, tensors: Sequence[Tensor]) -> Visit:
        end = self._layers.end
        return Visit(end, -1, activation, tensors, self._rng, None, Progress(end))


class WholeStep(StageStep):
    """The step where one process has all layers: it runs on the whole batch, as it is."""

    def run(self) -> Any:
        """Run the user's step, of which everything counts; return its output."""
        batch = self.batch
        visit = Visit(self.stage, 0, *NOTHING, None, None, Progress(self.stage))
        visit.ends_behind_layers = False
        self._rng.begin_run(is_whole=True)
        with batch.effects.counted(), self._layers.visit(visit), batch.precision():
            output = batch.called(batch.whole.batch)
            self._layers.end_step(visit, output, self._may_call_no_layer)
        return output


class WholeStageStep(TrainingStageStep, WholeStep):
    """The forward and the backward pass of a step on the whole batch, in one process."""

    def forward(self, microbatch: int, received: Any) -> Activation:
        """Run the user's step on the batch."""
        self._visits[microbatch] = self._visit(microbatch, NOTHING)
        with self._forward_context(self._visits[microbatch]):
            self.output = self.run()
        return Activation()

    def _own_gradients(self, microbatch: int) -> Gradients:
        return Gradients((), 1.0)

    def _differentiate(self, *_: Any) -> None:
        self._backward.differentiate(loss_of(self.output))


class EndedStageStep(TrainingStageStep):
    """The last stage where the loss of the batch is differentiated once, for all micro-batches."""

    def __init__(self, *shared: Any, **more: Any) -> None:
        super().__init__(*shared, **more)
        self._end = StepEnd(self.batch, self._layers, self._rng)
        self._activations: list[Activation] = []
        self._gradients: list[list[Tensor | None]] | None = None

    def forward(self, microbatch: int, received: Any) -> Activation:
        """Run the user's step on a micro-batch, to the return of the last layer."""
        activation = super().forward(microbatch, received)
        self._activations.append(activation)
        return activation

    def _own_gradients(self, microbatch: int) -> Gradients:
        if self._gradients is None:
            self._run_end()
        assert self._gradients is not None
        return Gradients(self._gradients[microbatch], None if self.is_void else 1.0)

    def _run_end(self) -> None:
        """Run the end of the step, and differentiate its loss."""
        try:
            self.output = self._end.run(self._activations)
        except RunAgain as error:
            self.is_void, self.again = True, error.why
            self._gradients = [[None] * len(sent_tensors(each)) for each in self._activations]
            return
        self._backward.differentiate(loss_of(self.output))
        self._gradients = self._end.gradients()
