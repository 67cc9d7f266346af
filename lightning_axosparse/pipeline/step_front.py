"""Runs the step on the whole batch up to its first layer, of which micro-batches get their rows.

So code that mixes samples before the layers (mixup, ``x - x.mean(0)``, a norm) does what it does on
one process, and is differentiated once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_axosparse.pipeline.batch_layout import copied
from lightning_axosparse.pipeline.crossing.placeholder import Progress
from lightning_axosparse.pipeline.crossing.skip_tensors import alias_of
from lightning_axosparse.pipeline.joining import Axis, axes
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rng import PipelineRNG
from lightning_axosparse.pipeline.stage_forward import FirstInputs, PipelinedLayers, Visit
from lightning_axosparse.pipeline.stage_step import NOTHING, Batch
from lightning_axosparse.support.object_trees import object_leaves, object_map


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
