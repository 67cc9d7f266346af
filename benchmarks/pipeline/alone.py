"""Times a stage's passes without waiting, and simulates a step from these times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import Gradients
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.planning.simulate import simulate
from lightning_axosparse.support.trace import clock


class ReadyLink:
    """A link whose messages have all arrived, and which sends nothing.

    Args:
        example: an activation, of the shape and dtype of all messages.
    """

    def __init__(self, example: Tensor) -> None:
        self._example = example
        self.activations: deque[Any] = deque()
        self.gradients: deque[Any] = deque()

    def begin(self, activations: int, gradients: int) -> None:
        self.activations = deque(self._example.clone().requires_grad_() for _ in range(activations))
        ones = torch.ones_like(self._example)
        self.gradients = deque(Gradients([ones.clone()], 1.0) for _ in range(gradients))

    def send_activation(self, tree: Any) -> None:
        pass

    def send_gradient(self, tree: Any) -> None:
        pass

    def poll(self) -> None:
        pass

    def end(self) -> None:
        pass


class Alone:
    """A runner that times the passes of a stage that never waits.

    Args:
        step: runs one step of the stage over a :class:`ReadyLink`, with deferred weight gradients.
        microbatches: micro-batches of a step.
    """

    def __init__(self, step: Callable[[], None], microbatches: int) -> None:
        self._step, self._microbatches = step, microbatches
        self._seconds: list[tuple[float, float, float]] = []

    def __call__(self, trial: int) -> None:
        clock.record()
        self._step()
        spans = clock.recorded()
        forward, inputs, weights = (
            sum(span.end - span.start for span in spans if span.activity == activity)
            / self._microbatches
            for activity in ("forward", "backward", "weight gradient")
        )
        self._seconds.append((forward, inputs + weights, weights))

    def predict(self, schedule: type[Schedule], limit: int) -> list[float]:
        """Return the simulated seconds of a step over ideal links in each trial; collective."""
        stages = MPI.COMM_WORLD.size
        everyone = MPI.COMM_WORLD.allgather(self._seconds[1:])  # the first was to warm up
        found = []
        for passes in zip(*everyone, strict=True):
            forward, backward, weights = zip(*passes, strict=True)
            order = [schedule(i, stages, self._microbatches, limit) for i in range(stages)]
            step = simulate(order, forward, backward, weight_gradient=weights)
            found.append(step.makespan)
        return found
