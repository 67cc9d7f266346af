"""Runs the step on the whole batch up to its first layer; micro-batches get rows of its inputs.

So code that mixes samples before the layers (mixup, ``x - x.mean(0)``, a norm) has the results of
one process, and is differentiated once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.crossing.skip_tensors import alias_of
from lightning_axosparse.pipeline.crossing.step_run import FirstInputs, StepRun
from lightning_axosparse.pipeline.joining import Axis, axes
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.support.object_trees import object_leaves, object_map
from lightning_axosparse.support.torch_internals import await_collective


class _FirstLayer(BaseException):
    """Ends a step where it calls its first layer."""

    def __init__(self, arguments: dict[Any, Any]) -> None:
        super().__init__("the first layer of the pipeline")
        self.arguments = arguments


def _raise_first_layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise _FirstLayer(_arguments(args, kwargs))


_Place: TypeAlias = tuple[Hashable, int]
"""A tensor in the inputs of the first layer: the argument, and the tensor's index in it."""


class StepFront:
    """The code before the layers, and the inputs that it computes for the first layer.

    Args:
        batch: the batch.
        parameters: those that get their gradients only when this code is differentiated.
    """

    def __init__(self, batch: Batch, parameters: Collection[nn.Parameter]) -> None:
        self._batch, self.parameters = batch, parameters
        self._inputs: dict[Hashable, Sequence[Tensor]] = {}
        self._axes: dict[_Place, Axis] = {}
        self._leaves: dict[_Place, list[tuple[MicroBatch, Tensor]]] = {}
        self._error: Exception | None = None

    def run(self) -> None:
        """Run the step up to its first layer; the first micro-batch raises its error, if any."""
        batch = self._batch
        run = StepRun(stage=0, sent=batch.sent(0), first_inputs=_raise_first_layer)
        try:
            with batch.effects.discarded():
                batch.call(run, batch.whole)
        except _FirstLayer as first:
            self._inputs = {key: object_leaves(v, Tensor) for key, v in first.arguments.items()}
        except Exception as error:
            self._error = error

    def of(self, part: MicroBatch) -> FirstInputs | None:
        """Return the function that replaces the first layer's inputs in a micro-batch's pass."""
        if self._error is not None:
            raise self._error
        if not self._inputs:
            return None

        def replaced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = _arguments(args, kwargs)
            new = {key: self._argument(part, key, value) for key, value in own.items()}
            return tuple(new[n] for n in range(len(args))), {name: new[name] for name in kwargs}

        return replaced

    def _argument(self, part: MicroBatch, key: Hashable, value: Any) -> Any:
        """Return a micro-batch's rows of an argument; ``value`` itself if it has other tensors."""
        own, whole = object_leaves(value, Tensor), self._inputs.get(key, ())
        if len(own) != len(whole):
            return value
        rows = iter([self._rows(part, (key, n), whole[n], own[n]) for n in range(len(own))])
        return object_map(Tensor, lambda tensor: next(rows), value)

    def _rows(self, part: MicroBatch, place: _Place, whole: Tensor, own: Tensor) -> Tensor:
        """Return a micro-batch's rows of a tensor; its ``own`` tensor if they are unknown."""
        rows = whole.detach()
        if whole.shape != own.shape:  # Else it has no samples, or the batch is one micro-batch.
            axis = self._axes.get(place) or self._axis(part, whole, own)
            if axis is None:
                return own
            self._axes[place] = axis
            rows = axis.part(rows, part.begin, part.size)
        await_collective(own)  # Nothing reads it.
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return rows
        leaf = rows.detach().requires_grad_()
        self._leaves.setdefault(place, []).append((part, leaf))
        return alias_of(leaf)

    def _axis(self, part: MicroBatch, whole: Tensor, own: Tensor) -> Axis | None:
        """Return the layout of an input; if shapes allow several, the one that fits the values."""
        samples, size = self._batch.whole.size, part.size
        candidates = axes(whole.shape, own.shape, samples, size)
        if not candidates and whole.dim() == own.dim():  # It may be trimmed to the longest sample.
            lengths = enumerate(zip(whole.shape, own.shape, strict=True))
            dims = [dim for dim, (n, few) in lengths if few and n * size == few * samples]
            candidates = [Axis(dim, whole.shape[dim] // samples) for dim in dims]
        if len(candidates) == 1:
            return candidates[0]
        values = ((axis, axis.part(whole.detach(), part.begin, size)) for axis in candidates)
        own = own.detach()
        return next((axis for axis, rows in values if torch.equal(rows, own)), None)

    def backward(self) -> None:
        """Differentiate the first layer's inputs, with the gradients of all micro-batches."""
        outputs, gradients = [], []
        for place, leaves in self._leaves.items():
            (key, number), axis = place, self._axes.get(place)
            whole = self._inputs[key][number]
            gradient = torch.zeros_like(whole)
            parts = [(part, leaf.grad) for part, leaf in leaves if leaf.grad is not None]
            for part, own in parts:
                if axis is None:
                    gradient += own
                else:
                    axis.add_part(gradient, own, part.begin, part.size)
            if parts:
                outputs.append(whole)
                gradients.append(gradient)
        if outputs:
            torch.autograd.backward(outputs, gradients)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Return the arguments of a layer by position and name."""
    return {**dict(enumerate(args)), **kwargs}
