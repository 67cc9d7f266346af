"""The times at which callbacks act: optimizer steps, shares of the run, or epochs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.support.arguments import COUNT, Kind, number
from lightning_axosparse.support.troubleshooting import see

Time = int | float
"""An int counts optimizer steps, a float is a share of the run."""

When = Time | str
"""A text such as "3 epochs" counts epochs."""

_EPOCHS = re.compile(r"([1-9]\d{0,8}) epochs?")

TIME = COUNT | number(
    "a share of the run (a float above 0, to 1.0)",
    lambda value: type(value) is float and 0 < value <= 1,
)
WHEN = TIME | Kind(
    "epochs such as '3 epochs'", lambda value: isinstance(value, str) and _epochs(value) > 0
)


@dataclass(frozen=True)
class Progress:
    """The optimizer steps and epochs of a run that have ended."""

    steps: int = 0
    epochs: int = 0

    def times(self, interval: When, trainer: Trainer) -> int:
        """Return how often an interval has passed, such as 2 for 25 steps and an interval of 10."""
        if isinstance(interval, str):
            return self.epochs // _epochs(interval)
        return self.steps // in_steps(interval, trainer)


def in_steps(time: Time, trainer: Trainer) -> int:
    """Return a time in optimizer steps: of a run of 400 steps, 0.25 are 100, and 30 are 30."""
    return max(1, round(time * total_steps(trainer))) if isinstance(time, float) else time


def total_steps(trainer: Trainer) -> int:
    """Return the optimizer steps of the whole run.

    Raises:
        MisconfigurationException: if their number is not known.
    """
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < math.inf:
        raise unknown_length_error()
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            steps = _scheduled_steps(trainer, callback)
    return int(steps)


def _scheduled_steps(trainer: Trainer, scheduler: GradientAccumulationScheduler) -> float:
    """Return the optimizer steps of a run whose accumulation factor changes between epochs.

    Lightning's estimate uses the factor of the present epoch for all epochs.
    """
    limit = math.inf if trainer.max_steps == -1 else trainer.max_steps
    if trainer.max_epochs in (None, -1) or trainer.num_training_batches == math.inf:
        return limit
    epochs = max(trainer.max_epochs, 1)
    starts = [start for start in scheduler.epochs if start < epochs]
    steps = 0
    for start, end in pairwise([*starts, epochs]):
        factor = scheduler.get_accumulate_grad_batches(start)
        steps += (end - start) * math.ceil(trainer.num_training_batches / factor)
    return min(steps, limit)


def _epochs(text: str) -> int:
    """Return the number in "3 epochs"; 0 if the text has another form."""
    match = _EPOCHS.fullmatch(text)
    return int(match[1]) if match else 0


def unknown_length_error() -> MisconfigurationException:
    """Return the error for a share of a run whose length is not known."""
    return MisconfigurationException(
        "The number of optimizer steps of this run is not known, so there is no share of it. Set "
        "the Trainer's max_steps, or give all times in optimizer steps, such as every=500."
        + see("tickets")
    )
