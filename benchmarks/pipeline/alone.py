"""Times a stage's passes without waiting, and simulates a step from these times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from lightning_axosparse.pipeline.crossing.message import (
    Activation,
    Gradients,
    Link,
    Message,
    detached_message,
)
from lightning_axosparse.pipeline.joining import sent_tensors
from lightning_axosparse.pipeline.schedule import Schedule
from lightning_axosparse.planning.simulate import simulate
from lightning_axosparse.support.trace import clock


class ReadyLink(Link):
    """A link whose messages have all arrived, and which sends nothing.

    Args:
        example: an activation, of the shape and dtype of all messages.
    """

    def __init__(self, example: Tensor) -> None:
        super().__init__()
        self._example = example.detach().requires_grad_()

    def begin(self, activations: int, gradients: int) -> None:
        ones = torch.ones_like(self._example)
        self.activations = deque(
            arrived(Activation(self._example.clone())) for _ in range(activations)
        )
        self.gradients = deque(arrived(Gradients([ones.clone()])) for _ in range(gradients))

    def send_activation(self, activation: Activation) -> Sequence[Tensor]:
        return sent_tensors(activation)


def arrived(content: Activation | Gradients) -> Message:
    """The message in which it has been received."""
    _, message = detached_message(content)
    return message


class Alone:
    """A runner that times the passes of a stage that never waits.

    Args:
        step: runs one step of the stage over a :class:`ReadyLink`.
        microbatches: micro-batches of a step.
    """

    def __init__(self, step: Callable[[], None], microbatches: int) -> None:
        self._step, self._microbatches = step, microbatches
        self._seconds: list[tuple[float, float]] = []

    def __call__(self, trial: int) -> None:
        clock.start_recording()
        self._step()
        spans = clock.stop_recording()
        forward, backward = (
            sum(span.end - span.start for span in spans if span.activity == activity)
            / self._microbatches
            for activity in ("forward", "backward")
        )
        self._seconds.append((forward, backward))

    def predict(self, schedule: type[Schedule], limit: int) -> list[float]:
        """Return the simulated seconds of a step over ideal links in each trial; collective."""
        stages = MPI.COMM_WORLD.size
        everyone = MPI.COMM_WORLD.allgather(self._seconds[1:])  # the first was to warm up
        found = []
        for passes in zip(*everyone, strict=True):
            forward, backward = zip(*passes, strict=True)
            order = [schedule(i, stages, self._microbatches, limit) for i in range(stages)]
            found.append(simulate(order, forward, backward).makespan)
        return found
