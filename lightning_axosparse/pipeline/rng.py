"""Seeds the random numbers that a step draws in a pipeline."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch


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
