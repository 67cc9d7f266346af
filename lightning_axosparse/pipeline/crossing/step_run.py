"""One run of the user's step: on a micro-batch, through one stage, or on the batch, for its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse.pipeline.backward.recompute import Segment
from lightning_axosparse.pipeline.crossing.front_values import FrontValues
from lightning_axosparse.pipeline.crossing.message import (
    NOTHING,
    Activation,
    Message,
    SentValues,
    StageReads,
)
from lightning_axosparse.pipeline.crossing.placeholder import StepProgress
from lightning_axosparse.pipeline.rng import NoticedDraws
from lightning_axosparse.support.torch_internals import plain_torch_functions
from lightning_axosparse.support.troubleshooting import see

AtFirstLayer = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Is called with the arguments of the first layer, and returns those to use."""


@dataclass(kw_only=True)
class StepRun:
    """One run of the step: on a micro-batch, through one stage, or on the batch, for its end.

    The end of the step is a stage after the last one, which has no layers.

    Attributes:
        stage: the stage.
        received: the message of the previous stage.
        sent: the values that the stage sends; None if the step runs to its end.
        seed_layers: seeds the layers; None if they draw as on one process.
        ends_behind_layers: whether the return of the last layer ends the step.
        reads: records the values of other stages that the stage reads; None if they are known.
        at_first_layer: called with the arguments of the first layer; returns those to use.
        front: follows the values that code before the first layer computes.
        behind_layers: called with the run at the return of the last layer, in a run of the end of
            the step; returns a context for the rest of the run.
        draws: notices draws outside the layers; None if they are followed, or if another run
            notices them.
        progress: the run's place in the step, to which its placeholders refer.
        next_layer: index of the layer that the step is to call next.
        segment: the current segment of layers, with activation checkpointing.
        sent_here: the stage's activation, if the step continues behind the last layer.
        numbers: those that Python has read from values between layers.
    """

    stage: int
    received: Message = NOTHING
    sent: SentValues | None
    seed_layers: Callable[[], object] | None = None
    ends_behind_layers: bool = True
    reads: StageReads | None = None
    at_first_layer: AtFirstLayer | None = None
    front: FrontValues | None = None
    behind_layers: Callable[[StepRun], AbstractContextManager[object]] | None = None
    draws: NoticedDraws | None = None

    progress: StepProgress = field(init=False, default_factory=StepProgress)
    next_layer: int = field(init=False, default=0)
    segment: Segment | None = field(init=False, default=None)
    sent_here: Activation | None = field(init=False, default=None)
    numbers: list[Any] = field(init=False, default_factory=list)

    def received_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of earlier stages: those received, and placeholders."""
        yield from self.received.tensors
        yield from self.progress.placeholders

    def validate_placeholders(self) -> None:
        """Check that no placeholder of a value of an earlier stage has a gradient."""
        placeholders = self.progress.placeholders
        with plain_torch_functions():
            used = [each for each in placeholders if each.grad is not None]
        placeholders.clear()
        if used:
            user = f"Stage {self.stage}" if self.sent is not None else "The end of the step"
            raise MisconfigurationException(
                f"{user} uses {used[0].source} in a way that could not be followed: "
                "the step gives it to a torch.autograd.Function or to compiled code. Do that "
                "inside a layer, put both ends into one stage (balance=...), or carry the value "
                "along in what the layers return." + see("values-between-layers")
            )
