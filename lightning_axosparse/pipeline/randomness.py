"""Randomness: the same numbers outside the layers on every stage, own numbers inside them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class Randomness:
    """The random numbers (torch, numpy, Python) that a step draws in a pipeline.

    Code outside the container runs on several stages and has to draw the same dropout mask on
    each; layers on different stages have to draw different ones. Both follow from the seed, the
    batch and the micro-batch, so a run is reproducible for a seed and a grid. The global generators
    are left as they were, so that all stages go on sampling the same batches. With one stage there
    is nothing to agree on and nothing is done.

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
        """Draw this batch's seed and protect the global generators."""
        if self._stages == 1:
            yield
            return
        self._batch = self._seeds.getrandbits(48)
        with self.protected():
            yield

    @contextmanager
    def protected(self) -> Iterator[None]:
        """Leave the global generators as they were before the context."""
        python, numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=self._devices):
            try:
                yield
            finally:
                random.setstate(python)
                np.random.set_state(numpy)

    def outside(self, microbatch: int) -> None:
        """Begin the numbers of the code round the layers for one micro-batch."""
        self._seed(microbatch, 0)

    def inside(self, microbatch: int, stage: int) -> None:
        """Begin the numbers of one stage's layers; the first stage goes on where it was."""
        if stage > 0:
            self._seed(microbatch, stage)

    def _seed(self, microbatch: int, stage: int) -> None:
        if self._stages == 1:
            return
        seed = random.Random(f"{self._batch}/{microbatch}/{stage}").getrandbits(63)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
