"""The random numbers of a step: those of code outside the layers, and those of layers.

Code outside the layers runs on several stages, for every micro-batch and for the batch as a whole.
Each run has to draw the numbers that one process draws for the batch; a micro-batch gets the rows
of its samples. So every run begins with the states that the generators had before the batch, and
after the batch they have the states that the run on the whole batch has left. Layers draw different
numbers for every micro-batch and stage, so a run is reproducible for a seed and a grid.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.pipeline.generators import Generators
from lightning_axosparse.pipeline.rerun import Rerun, RunAgain
from lightning_axosparse.support.torch_internals import (
    PausableOperatorMode,
    is_random,
    tensors_in,
    tree_leaves,
    tree_map_only,
    writes_unreturned,
)


class PipelineRNG:
    """Seeds the global generators (torch, NumPy, Python) for the runs of a batch.

    Args:
        seed: the seed, which is the same on every rank of a pipeline.
        device: device of the stage, whose generator is used besides the CPU's.
        part: index of this replica among those whose loaders return the same batches, if there are
            several: their steps draw different numbers and do not change the generators.
    """

    def __init__(self, seed: int, device: torch.device, part: int | None = None) -> None:
        self._seeds = random.Random(seed)
        self._device, self._part = device, part
        self._batch = 0
        self._begin: Generators
        """The states before the batch."""
        self._after: Generators
        """The states to restore after the batch."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Return the context of the runs of a batch; after it, restore the generators."""
        self._batch = self._seeds.getrandbits(48)
        self._begin = self._after = Generators(self._device)
        if self._part is not None:
            self.seed_layers(self._part, -1)
            self._begin = Generators(self._device)
        try:
            yield
        finally:
            self._after.restore(self._device)

    def begin_run(self) -> None:
        """Begin a run of the step: restore the states from before the batch."""
        self._begin.restore(self._device)

    def has_drawn(self) -> bool:
        """Whether code outside the layers has drawn since the run began."""
        return Generators(self._device) != self._begin

    def present(self) -> Generators:
        """Return the present states."""
        return Generators(self._device)

    def noticed_draws(self) -> NoticedDraws:
        """Return the mode that notices draws in a run that begins."""
        return NoticedDraws(self._begin)

    def keep(self) -> Generators | None:
        """Keep the present states for after the batch.

        Returns:
            The states, for :meth:`adopt` on other ranks; None if they are those before the batch.
        """
        if self._part is not None:
            return None
        self._after = Generators(self._device)
        return None if self._after == self._begin else self._after

    def adopt(self, state: Generators) -> None:
        """Keep the states of another rank for after the batch."""
        self._after = state

    def seed_layers(self, microbatch: int, stage: int) -> None:
        """Seed the generators for the layers of a stage."""
        seed = self.seed_torch(microbatch, stage)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def seed_torch(self, microbatch: int, stage: int) -> int:
        """Seed the generators of torch for the layers of a stage; return the seed."""
        seed = random.Random(f"{self._batch}/{microbatch}/{stage}").getrandbits(63)
        # `torch.manual_seed` takes milliseconds: it formats the stack for each kind of device that
        # is not in use.
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            index = self._device.index
            index = torch.cuda.current_device() if index is None else index
            torch.cuda.default_generators[index].manual_seed(seed)
        return seed

    @contextmanager
    def after_passes(self, stage: int) -> Iterator[None]:
        """Seed for code that runs on a stage after the passes of a batch; restore the states."""
        before = Generators(self._device)
        try:
            self.seed_layers(-1, stage)
            yield
        finally:
            before.restore(self._device)


class NoticedDraws(PausableOperatorMode):
    """Notices whether code outside the layers draws, from any generator of torch.

    Layers may change the global generators, and code may put them back (``fork_rng``), so states
    do not tell. Python's and NumPy's generators are compared once: if layers draw from them, too,
    it counts as well.

    Args:
        begin: the states before the run.
    """

    def __init__(self, begin: Generators) -> None:
        super().__init__()
        self._begin, self._has_drawn = begin, False

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator, and see whether it draws."""
        if not is_random(func):
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs)
        # Another stage has values on meta.
        has_values = not any(tensor.is_meta for tensor in tensors_in((args, kwargs)))
        self._has_drawn |= call.has_drawn or not has_values
        return call.output

    def has_drawn(self) -> bool:
        """Return whether numbers have been drawn since the run began."""
        return self._has_drawn or not self._begin.match_python_and_numpy()


class SampledNumbers(PausableOperatorMode):
    """Gives the runs of a step on micro-batches the random numbers of the whole batch.

    At each call that draws, the first run draws for all samples of the batch, and every run gets
    the rows of its samples: for ``torch.rand_like(x)`` of a batch of 4 and micro-batches of 2, the
    first run draws 4 rows, of which the second one gets the last 2. Numbers without a dimension of
    samples are the same in all runs, as are those of Python's and NumPy's generators, of which the
    layers use others meanwhile.

    Args:
        samples: number of samples in the batch.
        device: device of this rank.
        known: where samples lie in the numbers of each call, in order.
        guesses: whether they lie along the first dimension that is long enough, if it is not known.

    Attributes:
        problem: why a micro-batch did not get its rows; None if it did.
        mixes_between: whether that was between layers.
        has_drawn_own: whether a generator of the user's has drawn.
        outside: the states of the code outside the layers, before the last layer of a run.
        ends: those at the end of each run on a micro-batch, on the last stage.
    """

    has_drawn_own = mixes_between = False

    def __init__(
        self,
        samples: int,
        device: torch.device,
        known: Sequence[DrawnSamples] = (),
        guesses: bool = True,
    ) -> None:
        super().__init__()
        self.problem: str | None = None
        self._known, self._guesses = known, guesses
        self._samples, self._device = samples, device
        self._whole: list[_Drawn] = []
        self._used, self._first, self._end = 0, 0, samples
        self._own_states: dict[torch.Generator, Tensor] = {}
        """The states that the user's own generators had before the run."""
        self.outside: Generators | None = None
        self.ends: list[Generators] = []
        self._inside: Generators | None = None
        """The states of the layers."""

    @contextmanager
    def of(self, first: int, end: int, counts: bool = False) -> Iterator[None]:
        """Give the run inside the context, which enters the mode, the numbers of its samples.

        Args:
            first: index of the first sample.
            end: index after the last sample.
            counts: whether the user's own generators stay as the run leaves them.
        """
        self._used, self._first, self._end = 0, first, end
        self.outside = self._inside = None
        try:
            yield
        finally:
            for generator, state in self._own_states.items() if not counts else ():
                generator.set_state(state)
            self._own_states = {}

    def begin_layers(self) -> None:
        """Keep the states of the code outside the layers, which are seeded next."""
        self.outside = Generators(self._device)

    def pause(self) -> None:
        """Set the states of the layers, once they have been seeded."""
        if self._inside is not None:
            self.outside = Generators(self._device)
            self._inside.restore(self._device)

    def resume(self) -> None:
        """Set the states that the code before the layer has left."""
        if self.outside is not None:
            self._inside = Generators(self._device)
            self.outside.restore(self._device)

    def observe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operator; if it draws, replace the numbers by those of the samples."""
        if not is_random(func):
            return func(*args, **kwargs)
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            # Another stage has the values; draw them here, so that later numbers are the same.
            real = partial(_real, device=self._device)
            self.observe(func, *tree_map_only(Tensor, real, (args, dict(kwargs))))
            return func(*args, **kwargs)
        call = _Call(func, args, kwargs)
        self.has_drawn_own |= bool(call.own)
        self._own_states = {**call.own, **self._own_states}
        if not call.has_drawn:
            return call.output
        if self._end - self._first == self._samples and self._used == len(self._whole):
            self._whole.append(call.drawn())
            self._used += 1
            return call.output
        return self._sampled(call)

    def _sampled(self, call: _Call) -> Any:
        """Replace the numbers by the micro-batch's rows of those of the batch."""
        tensor, func, output = call.numbers, call.func, call.output
        outputs = [each for each in tensors_in(output) if each.numel()]
        mixes = "randperm" in str(func) or writes_unreturned(func)
        mixes |= len(outputs) != 1 and func is not torch.ops.aten.native_dropout.default
        if self._used == len(self._whole):
            self._whole.append(call.drawn() if mixes else self._drawn_whole(call))
        drawn = self._whole[self._used]
        self._used += 1
        call.set_states(drawn.states)  # Those of a draw for the whole batch, as of later draws.
        numbers = _of_samples(drawn.numbers, tensor.shape, self._first, self._end, self._samples)
        if numbers is None or mixes:
            self.problem = f"{_name(func)} draws numbers that belong to no single sample"
            self.mixes_between |= self.outside is not None
            return output
        tensor.detach().copy_(numbers)
        if func is torch.ops.aten.native_dropout.default:  # dropout on CUDA; it returns its mask
            probability = call.args[1]
            scale = 1 / (1 - probability) if probability < 1 else 0.0
            torch.mul(call.args[0], output[1] * scale, out=output[0])
        return output

    def _dim_of_samples(self, shape: torch.Size, size: int) -> int | None:
        """Return the dimension of samples in the numbers for a micro-batch; None if there is none.

        Raises:
            RunAgain: if it is not known.
        """
        known = self._known[self._used] if self._used < len(self._known) else None
        if known is not None and known.fits(shape, size):
            return known.dim
        if not self._guesses:
            raise RunAgain(Rerun.SAMPLES)
        return next((dim for dim, n in enumerate(shape) if n and n % size == 0), None)

    def _drawn_whole(self, call: _Call) -> _Drawn:
        """Draw again for all samples of the batch, as the run on the whole batch would."""
        tensor, size = call.numbers, self._end - self._first
        dim = self._dim_of_samples(tensor.shape, size)
        if dim is None:
            return call.drawn()
        shape = list(tensor.shape)
        shape[dim] = shape[dim] // size * self._samples
        rows = slice(self._first * tensor.shape[dim] // size, self._end * tensor.shape[dim] // size)

        def widened(value: Any) -> Any:
            if isinstance(value, Tensor) and value.shape == tensor.shape:
                # Rows of other micro-batches are drawn with the parameters of the first row.
                wide = value.narrow(dim, 0, 1).expand(shape).clone()
                wide.narrow(dim, rows.start, rows.stop - rows.start).copy_(value)
                return wide
            if isinstance(value, (list, tuple)) and list(value) == list(tensor.shape):
                return type(value)(shape)
            return value

        call.set_states(call.before)
        args = [widened(value) for value in call.args]
        wide = _Call(call.func, args, {key: widened(v) for key, v in call.kwargs.items()})
        return wide.drawn()


class ComparedNumbers(SampledNumbers):
    """Gives micro-batches their rows of the numbers that are drawn inside the layers, too.

    Micro-batches run before the batch, which shows where samples lie in the numbers.

    Attributes:
        draws_outside: whether the step has drawn numbers outside the layers.
        guessed_wrong: whether micro-batches got other rows.
        drawn: where samples lie in the numbers of all calls.
        drawn_outside: the same, of the calls outside the layers.
    """

    draws_outside = guessed_wrong = False
    may_leave = False

    def __init__(
        self, samples: int, device: torch.device, known: Sequence[DrawnSamples] = ()
    ) -> None:
        super().__init__(samples, device, known)
        self._shapes: list[torch.Size] = []
        """The shapes of the numbers for a micro-batch."""
        self.drawn: list[DrawnSamples] = []
        self.drawn_outside: list[DrawnSamples] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used, known = self._used, len(self.drawn)
        output = self.observe(func, args, kwargs or {})
        if self._used > used and not self._is_paused:
            self.draws_outside = True
            self.drawn_outside += self.drawn[known:]
        return output

    def _sampled(self, call: _Call) -> Any:
        place, shape = self._used, call.numbers.shape
        is_whole = self._end - self._first == self._samples
        if not is_whole and place == len(self._shapes):
            self._shapes.append(shape)
        elif is_whole and len(self.drawn) == place < len(self._shapes):
            self.drawn.append(DrawnSamples.of(shape, self._shapes[place]))
            self.guessed_wrong |= self._whole[place].numbers.shape != shape
        return super()._sampled(call)

    def begin_layers(self) -> None:
        """Do nothing: layers draw from the same states."""

    pause = resume = begin_layers


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta:
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


class DrawnSamples(NamedTuple):
    """Where samples lie in the numbers of a call.

    Attributes:
        dims: the number of dimensions.
        dim: the dimension of samples; None if there is none.
    """

    dims: int
    dim: int | None

    def fits(self, shape: torch.Size, size: int) -> bool:
        """Whether the numbers for a micro-batch of ``size`` samples may have a shape."""
        return self.dims == len(shape) and (self.dim is None or shape[self.dim] % size == 0)

    @classmethod
    def of(cls, whole: torch.Size, part: torch.Size) -> DrawnSamples:
        """Compare the shapes of the numbers for a batch and for a micro-batch."""
        pairs = zip(whole, part, strict=False)
        return cls(len(whole), next((dim for dim, (n, few) in enumerate(pairs) if n != few), None))


class _Drawn(NamedTuple):
    """The numbers of a call, and the states of the generators after it."""

    numbers: Tensor
    states: Sequence[Tensor]


class _Call:
    """A call of an operator that may draw.

    Attributes:
        own: the user's own generators among its arguments, with their states before the call.
        output: its output.
        has_drawn: whether it has drawn; a fused function without dropout does not.
        before: the states of the generators before it.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        generators = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Generator)]
        self.own = {generator: generator.get_state() for generator in generators}
        self.before = self._states()
        self.output = func(*args, **kwargs)
        self._after = self._states()
        self.has_drawn = not all(map(torch.equal, self.before, self._after))

    @property
    def numbers(self) -> Tensor:
        """The tensor of the numbers that it has drawn."""
        if self.func is torch.ops.aten.native_dropout.default:
            mask: Tensor = self.output[1]
            return mask
        return next(tensor for tensor in tensors_in(self.output) if tensor.numel())

    def drawn(self) -> _Drawn:
        """Return its numbers, and the states of the generators after it."""
        return _Drawn(self.numbers.detach().clone(), self._after)

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Set the states of the generators: torch's, the user's own ones, and the GPU's."""
        torch.set_rng_state(states[0])
        for generator, state in zip(self.own, states[1:], strict=False):
            generator.set_state(state)
        if len(states) > 1 + len(self.own):
            torch.cuda.set_rng_state(states[-1])

    def _states(self) -> list[Tensor]:
        states = [torch.get_rng_state(), *(generator.get_state() for generator in self.own)]
        return [*states, torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else states


def _name(func: Any) -> str:
    return "torch." + str(func).removeprefix("aten.").split(".")[0].strip("_")


def _of_samples(
    whole: Tensor, shape: torch.Size, first: int, end: int, samples: int
) -> Tensor | None:
    """Return the rows of samples in the numbers of a batch; None if it is not clear which."""
    if whole.shape == shape:
        return whole
    if whole.dim() != len(shape):
        return None
    unequal = [dim for dim, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if a != b]
    (dim, *others) = unequal
    each, rest = divmod(whole.shape[dim], samples)
    if others or rest or shape[dim] != each * (end - first):
        return None
    return whole.narrow(dim, first * each, shape[dim])
