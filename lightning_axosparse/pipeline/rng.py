"""Gives the code of a step and the layers of each micro-batch their random numbers.

Code outside the layers runs on several stages, for every micro-batch and for the batch as a whole,
and has to draw the same numbers each time: those that one process draws for the batch, of which a
micro-batch gets the part of its samples. Every run of it begins with the generators as they were
before the batch; after it they are as the run on the whole batch has left them. Layers draw other
numbers for every micro-batch and stage, so a run is reproducible for a seed and a grid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.pipeline.state.values import same
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    is_random,
    tensors_in,
    tree_leaves,
    tree_map_only,
    writes_beside,
)


class Generators:
    """The global generators of torch, NumPy and Python, in one state; can be pickled.

    Args:
        device: of this rank, whose generator counts besides that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._torch = torch.get_rng_state()
        is_cuda = device.type == "cuda"
        self._cuda = torch.cuda.get_rng_state(device) if is_cuda else None
        self._numpy, self._python = np.random.get_state(), random.getstate()

    def restore(self, device: torch.device, numpy: bool = True) -> None:
        """Put the generators into this state; that of NumPy takes a tenth of a millisecond."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, device)
        random.setstate(self._python)
        if numpy:
            np.random.set_state(self._numpy)

    def have_drawn(self, device: torch.device) -> bool:
        """Whether torch's generators are in another state now."""
        if not torch.equal(self._torch, torch.get_rng_state()):
            return True
        return self._cuda is not None and not torch.equal(
            self._cuda, torch.cuda.get_rng_state(device)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Generators) or self._python != other._python:
            return False
        kept = ((each._torch, each._cuda, *each._numpy) for each in (self, other))
        return all(map(same, *kept))

    __hash__ = None  # type: ignore[assignment]


class PipelineRNG:
    """Seeds the global generators (torch, NumPy, Python) for the runs of a batch.

    Args:
        seed: the same on every rank of a pipeline.
        device: device of the stage, whose generator is used besides the CPU's.
        part: a number of this replica among those whose loaders return the same batches, if there
            are several: their steps draw different numbers, and leave the generators alone.

    Attributes:
        uses_numpy: whether steps have been seen to draw by NumPy's generator.
    """

    def __init__(self, seed: int, device: torch.device, part: int | None = None) -> None:
        self._seeds = random.Random(seed)
        self._device, self._part = device, part
        self._batch = 0
        self._begin: Generators
        """The states of before the batch."""
        self._after: Generators
        self.uses_numpy = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Surround the runs of a batch; after it the generators are as before, or as kept."""
        self._batch = self._seeds.getrandbits(48)
        self._begin = self._after = Generators(self._device)
        if self._part is not None:
            self.seed_layers(self._part, -1)
            self._begin = Generators(self._device)
        try:
            yield
        finally:
            self._after.restore(self._device)

    def begin_run(self, is_whole: bool = False) -> None:
        """Let a run of the step begin with the generators as they were before the batch."""
        self._begin.restore(self._device, numpy=is_whole or self.uses_numpy)

    def has_drawn(self) -> bool:
        """Whether torch's generators have drawn since a run of the step began."""
        return self._begin.have_drawn(self._device)

    def keep(self) -> Generators | None:
        """Leave the generators behind as they are now.

        Returns:
            Their state, for :meth:`adopt` on other ranks; None if it is that from before the batch.
        """
        if self._part is not None:
            return None
        self._after = Generators(self._device)
        return None if self._after == self._begin else self._after

    def adopt(self, state: Generators) -> None:
        """Leave the generators behind as another rank has left its own."""
        self._after = state

    def seed_layers(self, microbatch: int, stage: int) -> None:
        """Seed for the layers of a stage."""
        random.seed(f"{self._batch}/{microbatch}/{stage}")
        seed = random.getrandbits(63)
        # `torch.manual_seed` takes milliseconds: it formats the stack for each kind of device that
        # is not in use.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            index = self._device.index
            index = torch.cuda.current_device() if index is None else index
            torch.cuda.default_generators[index].manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    @contextmanager
    def after_passes(self, stage: int) -> Iterator[None]:
        """Seed for what a stage draws after the passes of the last batch, and restore after it."""
        before = Generators(self._device)
        try:
            self.seed_layers(-1, stage)
            yield
        finally:
            before.restore(self._device)


class SampledNumbers(PausableOperatorMode):
    """Gives the runs of a step on micro-batches the numbers that one on the whole batch draws.

    In each place of the step the first run draws for all samples of the batch, and every run gets
    the rows of its own. What has no dimension of samples is the same in all runs.

    Args:
        samples: of the batch.

    Attributes:
        problem: why a micro-batch could not get its part; None if it could.
        dim: along which the samples lie in what was drawn last; None if that has no samples.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.problem: str | None = None
        self.dim: int | None = None
        self._samples = samples
        self._whole: list[Tensor] = []
        self._used, self._first, self._end = 0, 0, samples
        self._given: dict[torch.Generator, Tensor] = {}
        """The states that generators of the user's had before a run."""
        self._inside: list[Tensor] | None = None
        """The states that the global generators have inside the layers."""

    @contextmanager
    def of(self, first: int, end: int, counts: bool = False) -> Iterator[None]:
        """Give the run inside the context, which enters the mode, the numbers of some samples.

        Args:
            first: the first of them.
            end: the one after the last.
            counts: whether generators that the code has named stay as the run leaves them.
        """
        self._used, self._first, self._end, self._inside = 0, first, end, None
        try:
            yield
        finally:
            for generator, state in self._given.items() if not counts else ():
                generator.set_state(state)
            self._given = {}

    def pause(self) -> None:
        """Let the layers draw from states of their own."""
        self._outside = _states(())
        if self._inside is not None:
            _restore(self._inside, ())

    def resume(self) -> None:
        """Go on with the states that the code before the layers has left."""
        self._inside = _states(())
        _restore(self._outside, ())

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and give a micro-batch the numbers of its samples if it draws some."""
        if not is_random(func):
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            # Its values are another stage's, but the numbers after it have to be those after it.
            self.observe(func, *tree_map_only(Tensor, _real, (args, dict(kwargs))))
            return func(*args, **kwargs)
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Generator)]
        for generator in given:
            self._given.setdefault(generator, generator.get_state())
        before = _states(given)
        output = func(*args, **kwargs)
        made = [tensor for tensor in tensors_in(output) if tensor.numel()]
        # A fused function without dropout draws nothing.
        if all(map(torch.equal, before, _states(given))):
            return output
        if self._end - self._first == self._samples and self._used == len(self._whole):
            self._whole.append(_numbers(func, args, output).detach().clone())
            self._used += 1
            return output
        return self._sampled(func, args, kwargs, output, made, before, given)

    def _sampled(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        made: Sequence[Tensor],
        before: Sequence[Tensor],
        given: Sequence[torch.Generator],
    ) -> Any:
        """Give a micro-batch its part of the numbers of the batch."""
        tensor = _numbers(func, args, output)
        mixes = "randperm" in str(func) or writes_beside(func)
        mixes |= len(made) != 1 and func is not torch.ops.aten.native_dropout.default
        if self._used == len(self._whole):
            drawn = tensor.detach().clone()
            if not mixes:
                drawn = self._drawn_whole(func, args, kwargs, tensor, before, given)
            self._whole.append(drawn)
        whole = self._whole[self._used]
        self._used += 1
        numbers = _of_samples(whole, tensor.shape, self._first, self._end, self._samples)
        if numbers is None or mixes:
            self.problem = f"it draws numbers ({_name(func)}) that belong to no single sample"
            return output
        unlike = (
            d for d, (a, b) in enumerate(zip(whole.shape, tensor.shape, strict=True)) if a != b
        )
        self.dim = next(unlike, None)
        tensor.detach().copy_(numbers)
        if func is torch.ops.aten.native_dropout.default:  # dropout on CUDA; it returns its mask
            scale = 1 / (1 - args[1]) if args[1] < 1 else 0.0
            torch.mul(args[0], output[1] * scale, out=output[0])
        return output

    def _drawn_whole(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensor: Tensor,
        before: Sequence[Tensor],
        given: Sequence[torch.Generator],
    ) -> Tensor:
        """Draw in a place for all samples of the batch, as the run on the whole batch would."""
        size = self._end - self._first
        dim = next((d for d, n in enumerate(tensor.shape) if n and n % size == 0), None)
        if dim is None:
            return tensor.detach().clone()
        shape = list(tensor.shape)
        shape[dim] = shape[dim] // size * self._samples
        rows = slice(self._first * tensor.shape[dim] // size, self._end * tensor.shape[dim] // size)

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == tensor.shape:
                # What is not this micro-batch's is drawn with the parameters of its first row.
                wide = value.narrow(dim, 0, 1).expand(shape).clone()
                wide.narrow(dim, rows.start, rows.stop - rows.start).copy_(value)
                return wide
            if isinstance(value, (list, tuple)) and list(value) == list(tensor.shape):
                return type(value)(shape)
            return value

        _restore(before, given)
        wide_args = [widened(value) for value in args]
        wide = func(*wide_args, **{key: widened(value) for key, value in kwargs.items()})
        return _numbers(func, wide_args, wide).detach().clone()


class ComparedNumbers(SampledNumbers):
    """Gives micro-batches their part of the numbers inside the layers, too.

    Attributes:
        draws_outside: whether the step has drawn numbers outside the layers.
    """

    draws_outside = False
    may_leave = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = self._used
        output = self.observe(func, args, kwargs or {})
        self.draws_outside |= self._used > used and not self._is_paused
        return output

    def pause(self) -> None:
        """Go on with the same generators."""

    resume = pause


def _real(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor


def _states(given: Sequence[torch.Generator]) -> list[Tensor]:
    states = [torch.get_rng_state(), *(generator.get_state() for generator in given)]
    return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def _restore(states: Sequence[Tensor], given: Sequence[torch.Generator]) -> None:
    own, *others = states
    torch.set_rng_state(own)
    for generator, state in zip(given, others, strict=False):
        generator.set_state(state)
    if len(others) > len(given):
        torch.cuda.set_rng_state(others[-1])


def _numbers(func: Any, args: Any, output: Any) -> Tensor:
    """The tensor of the numbers that an operator has drawn."""
    if func is torch.ops.aten.native_dropout.default:
        mask: Tensor = output[1]
        return mask
    return next(tensor for tensor in tensors_in(output) if tensor.numel())


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
