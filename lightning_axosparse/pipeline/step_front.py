"""Runs the step on the whole batch up to its first layer; micro-batches get rows of its results.

So code that mixes samples before the layers (mixup, ``x - x.mean(0)``, a norm) has the results of
one process, and is differentiated once. The first layer's inputs are always replaced. The other
results are compared, in each micro-batch on the first stage; if code mixes samples, every stage
runs it on the batch, and they are replaced as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from lightning_axosparse.pipeline.batch import Batch
from lightning_axosparse.pipeline.crossing.front_values import FrontValues, Number
from lightning_axosparse.pipeline.crossing.message import Place
from lightning_axosparse.pipeline.crossing.placeholder import alias_of
from lightning_axosparse.pipeline.crossing.step_run import StepRun
from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.joining import (
    Axis,
    axes,
    closest,
    difference,
    differs,
    rounding,
)
from lightning_axosparse.pipeline.microbatch import MicroBatch
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.support.object_trees import object_leaves, object_map
from lightning_axosparse.support.torch_internals import await_collective


class _FirstLayer(BaseException):
    """Ends a step where it calls its first layer."""

    def __init__(self) -> None:
        super().__init__("the first layer of the pipeline")


_Key: TypeAlias = Place | tuple[Hashable, int]
"""A result before the first layer, or a tensor in an argument of that layer, by its index."""


class StepFront:
    """The code before the layers, and the values that it computes.

    Args:
        batch: the batch.
        stage: the first stage of this process.
        parameters: those that get their gradients only when this code is differentiated.
    """

    def __init__(self, batch: Batch, stage: int, parameters: Collection[nn.Parameter]) -> None:
        self._batch, self._stage, self.parameters = batch, stage, parameters
        self._whole: dict[_Key, Tensor] = {}
        """The values of the batch."""
        self._functions: list[Callable[..., Any]] = []
        """The functions that have computed them."""
        self._numbers: list[Number] = []
        """The numbers that Python has read from tensors of the batch."""
        self._arguments: dict[Hashable, int] = {}
        """The number of tensors in each argument of the first layer."""
        self._axes: dict[_Key, Axis | None] = {}
        self._leaves: dict[_Key, list[tuple[MicroBatch, Tensor]]] = {}
        self._error: Exception | None = None
        self._unlike = Rerun.SAMPLES if batch.mixes else Rerun.MIXES
        """What to know if values of a micro-batch are none of the batch."""
        self._differ: list[Tensor] = []
        """Whether results of micro-batches and of the batch differ."""
        self._drawn: Generators | None = None
        """The states of the generators before the first layer, if the step draws."""

    def run(self) -> None:
        """Run the step up to its first layer; the first micro-batch raises its error, if any."""
        batch, front = self._batch, FrontValues()

        def end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
            self._drawn = batch.rng.present() if batch.numbers else None
            self._functions, self._numbers = front.functions, front.numbers
            for place, result in front.alive().items():
                self._whole[place] = result
            for name, value in _arguments(args, kwargs).items():
                tensors = object_leaves(value, Tensor)
                self._arguments[name] = len(tensors)
                self._whole |= {(name, index): tensor for index, tensor in enumerate(tensors)}
            raise _FirstLayer

        sent = batch.sent(self._stage)
        run = StepRun(stage=self._stage, sent=sent, at_first_layer=end, front=front)
        try:
            with batch.effects.discarded():
                batch.call(run, batch.whole)
        except _FirstLayer:
            pass
        except Exception as error:
            self._error = error

    def follow(self, run: StepRun, part: MicroBatch) -> None:
        """Give a run on a micro-batch its rows of the values, on a stage that needs them.

        The run raises :class:`RunAgain` if it is not clear which rows these are, or if other
        stages need them, too.
        """
        if self._error is not None:
            raise self._error
        mixes, is_first = self._batch.mixes, run.stage == 0
        if not self._whole or not (is_first or mixes):
            return
        front = run.front = FrontValues(mixes, self._numbers if mixes else None)

        def rows(place: Place, own: Tensor) -> Tensor:
            whole = self._whole.get(place)
            return own if whole is None else self._rows(part, place, whole, own)

        def at_first_layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._drawn is not None and not self._drawn.match_python_and_numpy():
                raise RunAgain(Rerun.SAMPLES)  # It draws a number for each sample.
            results = {} if mixes else front.alive()
            if front.functions != self._functions or front.numbers != self._numbers:
                results = self._of_other_branch(front)
            front.end_front(rows)
            if results or self._differ:
                self._compare(part, results)
            if not is_first:
                return args, kwargs
            own = _arguments(args, kwargs)
            new = {name: self._argument(part, name, value) for name, value in own.items()}
            return tuple(new[n] for n in range(len(args))), {name: new[name] for name in kwargs}

        run.at_first_layer = at_first_layer

    def _of_other_branch(self, front: FrontValues) -> dict[Place, Tensor]:
        """Return the results of a micro-batch that has read other numbers than the batch.

        If later code reads equal results, another branch makes no difference. So they have the
        places of those of the batch, with which they are compared.
        """
        mixes, own = self._batch.mixes, front.alive()
        is_alike = _reads(front.numbers) == _reads(self._numbers)
        is_same = is_alike and front.functions == self._functions
        if is_same and mixes:
            return {}
        has_other_numbers = front.numbers != self._numbers
        self._unlike = Rerun.MIXES if has_other_numbers and not mixes else Rerun.SAMPLES
        places = sorted(place for place in self._whole if isinstance(place, Place))
        computed_by = _functions(places, self._functions)
        if mixes or is_same or _functions(sorted(own), front.functions) != computed_by:
            raise RunAgain(self._why_unlike())
        return {place: own[other] for place, other in zip(places, sorted(own), strict=True)}

    def _compare(self, part: MicroBatch, results: Mapping[Place, Tensor]) -> None:
        """Check that a micro-batch computes itself the rows of the batch's results.

        The last micro-batch raises the error, as reading a value waits for the device.
        """
        for place, own in results.items():
            whole = self._whole.get(place)
            if whole is None or whole is own:
                continue
            own, whole = own.detach(), whole.detach()
            if whole.shape != own.shape:
                axis = self._axis(part, place, whole, own)
                if axis is None:
                    continue
                whole = axis.part(whole, part.begin, part.size)
            if whole.shape != own.shape:
                raise RunAgain(self._why_unlike())
            if own.numel() and not (own.is_cpu and torch.equal(whole, own)):
                self._differ.append(differs(whole, own))
        is_last = part.begin + part.size == self._batch.whole.size
        if is_last and any(map(bool, self._differ)):
            raise RunAgain(self._why_unlike())

    def _why_unlike(self) -> Rerun:
        """Return why values of a micro-batch are none of the batch, and so what has to be known."""
        draws = not self._batch.numbers and self._batch.rng.has_drawn()
        return Rerun.DRAWS if draws else self._unlike

    def _argument(self, part: MicroBatch, name: Hashable, value: Any) -> Any:
        """Return a micro-batch's rows of an argument; ``value`` itself if it has other tensors."""
        own = object_leaves(value, Tensor)
        if len(own) != self._arguments.get(name, 0):
            return value
        keys = [(name, index) for index in range(len(own))]
        rows = (self._rows(part, key, self._whole[key], own[key[1]]) for key in keys)
        return object_map(Tensor, lambda tensor: next(rows), value)

    def _rows(self, part: MicroBatch, key: _Key, whole: Tensor, own: Tensor) -> Tensor:
        """Return a micro-batch's rows of a tensor; its ``own`` tensor if they are unknown."""
        rows = whole.detach()
        if whole.shape != own.shape:  # Else it has no samples, or the batch is one micro-batch.
            axis = self._axis(part, key, whole, own)
            if axis is None:
                return own
            rows = axis.part(rows, part.begin, part.size)
        rows = rows.clone()  # A layer may write to it.
        await_collective(own)  # Nothing reads it.
        if not (whole.requires_grad and torch.is_grad_enabled()):
            return rows
        leaf = rows.detach().requires_grad_()
        self._leaves.setdefault(key, []).append((part, leaf))
        return alias_of(leaf)

    def _axis(self, part: MicroBatch, key: _Key, whole: Tensor, own: Tensor) -> Axis | None:
        """Return the layout of a value; None if every micro-batch computes its own."""
        if key not in self._axes:
            fitting = self._fitting(part, key, whole, own)
            if len(fitting) > 1:  # They fit alike; another micro-batch may tell.
                return fitting[0]
            self._axes[key] = next(iter(fitting), None)
        return self._axes[key]

    def _fitting(self, part: MicroBatch, key: _Key, whole: Tensor, own: Tensor) -> list[Axis]:
        """Return the layouts with which the batch's value has a micro-batch's own rows."""
        layouts, place = self._batch.layouts, ("front", *key)
        samples, size = self._batch.whole.size, part.size
        candidates = _candidates(whole.shape, own.shape, samples, size)
        if (known := layouts.known.get(place)) is not None:
            fewer = [axis for axis in candidates if axis in known]
            candidates = fewer if fewer or not known else candidates
        if len(candidates) < 2:
            return candidates
        own, values, limit = own.detach(), whole.detach(), rounding(own.dtype)
        parts = [axis.part(values, part.begin, size) for axis in candidates]
        tried = [(_apart(p, own), axis) for p, axis in zip(parts, candidates, strict=True)]
        fitting = closest(tried, limit) if min(tried)[0] <= limit else []
        if layouts.compares:
            if not fitting and own.is_floating_point():  # The comparison shows whether it is right.
                alike = [_equal_entries(p, own) for p in parts]
                fitting = [candidates[alike.index(max(alike))]]
            layouts.narrow(place, fitting)
            return fitting
        if not fitting:
            raise RunAgain(self._why_unlike())
        if len(fitting) > 1 and whole.requires_grad and torch.is_grad_enabled():
            raise RunAgain(Rerun.SAMPLES)
        return fitting

    def backward(self) -> None:
        """Differentiate the values, with the gradients of all micro-batches."""
        outputs, gradients = [], []
        for key, leaves in self._leaves.items():
            whole, axis = self._whole[key], self._axes.get(key)
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


def _reads(numbers: Sequence[Number]) -> list[Callable[..., Any]]:
    return [func for func, _ in numbers]


def _functions(
    places: Sequence[Place], functions: Sequence[Callable[..., Any]]
) -> list[tuple[Callable[..., Any] | None, int]]:
    """Return the function that has computed each result, with the result's index."""
    return [(functions[p.result - 1] if p.result else None, p.leaf) for p in places]


def _apart(rows: Tensor, own: Tensor) -> float:
    if rows.shape != own.shape:
        return float("inf")
    return 0.0 if torch.equal(rows, own) else difference(rows, own)


def _equal_entries(rows: Tensor, own: Tensor) -> float:
    return float((rows == own).double().mean()) if rows.shape == own.shape else -1.0


def _candidates(whole: torch.Size, own: torch.Size, samples: int, size: int) -> list[Axis]:
    """Return the layouts that shapes allow of a value, in a batch and in a micro-batch."""
    candidates = axes(whole, own, samples, size)
    if candidates or len(whole) != len(own):
        return candidates
    # It may be trimmed to the longest sample.
    lengths = enumerate(zip(whole, own, strict=True))
    dims = [dim for dim, (n, few) in lengths if few and n * size == few * samples]
    return [Axis(dim, whole[dim] // samples) for dim in dims]


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Return the arguments of a layer by position and name."""
    return {**dict(enumerate(args)), **kwargs}
