"""Seeds the random numbers that a step draws in a pipeline, and gives them to its micro-batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_axosparse.support.torch_internals import (
    OperatorMode,
    is_random,
    tensors_in,
    tree_leaves,
    writes_beside,
)


class PipelineRNG:
    """Seeds the global generators (torch, numpy, Python) for each micro-batch on each stage.

    Code outside the layers runs on several stages and has to draw the same dropout mask on each;
    layers on different stages have to draw different ones. Both follow from the seed, the batch and
    the micro-batch, so a run is reproducible for a seed and a grid. After a batch the generators
    are as they were, so that all stages continue to sample the same batches. With one stage nothing
    is seeded.

    Args:
        seed: the same on every rank of a pipeline.
        stages: number of stages.
        device: device of the stage, whose generator is used besides the CPU's.
    """

    def __init__(self, seed: int, stages: int, device: torch.device) -> None:
        self._seeds = random.Random(seed)
        self._stages = stages
        self._devices = [device] if device.type == "cuda" else []
        self._batch = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Draw the seed of a batch, and restore the global generators after it."""
        if self._stages == 1:
            yield
            return
        self._batch = self._seeds.getrandbits(48)
        with self.generators_restored():
            yield

    @contextmanager
    def generators_restored(self) -> Iterator[None]:
        """Restore the global generators when the context ends."""
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=self._devices):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)

    def seed_outside_layers(self, microbatch: int) -> None:
        """Seed for the code around the layers: the same for a micro-batch on all stages."""
        self._seed(microbatch, 0)

    def seed_inside_layers(self, microbatch: int, stage: int) -> None:
        """Seed for the layers of a stage; the first stage continues with the numbers before."""
        if stage > 0:
            self._seed(microbatch, stage)

    @contextmanager
    def after_passes(self, stage: int) -> Iterator[None]:
        """Seed for what a stage draws after the passes of the last batch, and restore after it."""
        with self.generators_restored() if self._stages > 1 else nullcontext():
            self._seed(-1, stage)
            yield

    def _seed(self, microbatch: int, stage: int) -> None:
        if self._stages == 1:
            return
        random.seed(f"{self._batch}/{microbatch}/{stage}")
        seed = random.getrandbits(63)
        # `torch.manual_seed` takes milliseconds: it formats the stack for each kind of device that
        # is not in use.
        torch.default_generator.manual_seed(seed)
        for device in self._devices:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.default_generators[index].manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


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
