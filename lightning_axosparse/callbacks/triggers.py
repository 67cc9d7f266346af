"""Says when something happens in a run: by optimizer steps, by epochs or by a share of the run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.support.arguments import COUNT, Kind, number
from lightning_axosparse.support.troubleshooting import see

When = int | float | str
"""An int counts optimizer steps, a float is a share of the run, "3 epochs" counts epochs."""

_EPOCHS = re.compile(r"([1-9]\d{0,8}) epochs?")

WHEN = (
    COUNT
    | number(
        "a share of the run (a float above 0, to 1.0)",
        lambda value: type(value) is float and 0 < value <= 1,
    )
    | Kind("epochs such as '3 epochs'", lambda value: isinstance(value, str) and _epochs(value) > 0)
)


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps, and epochs that have ended."""

    steps: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Moment:
    """A number of optimizer steps or epochs since the start of a run, or between two events."""

    count: int
    unit: Literal["steps", "epochs"]

    @classmethod
    def of(cls, when: When, total: Callable[[], int]) -> Moment:
        """Convert a value of kind ``WHEN``; ``total`` gives the steps of the run, for shares."""
        if isinstance(when, str):
            return cls(_epochs(when), "epochs")
        if isinstance(when, float):
            return cls(max(1, round(when * total())), "steps")
        return cls(when, "steps")

    def reached(self, progress: Progress) -> bool:
        """Return whether the run has come so far."""
        passed: int = getattr(progress, self.unit)
        return passed >= self.count

    def again_since(self, before: Progress, now: Progress) -> bool:
        """Return whether another multiple of it lies after ``before`` and not after ``now``."""
        earlier, passed = (getattr(progress, self.unit) // self.count for progress in (before, now))
        return bool(passed > earlier)


def total_steps(trainer: Trainer) -> int:
    """Return the optimizer steps of the whole run, or say that they cannot be known."""
    steps = trainer.estimated_stepping_batches
    if not 0 < steps < math.inf:
        raise _endless()
    for callback in callbacks_of(trainer):
        if isinstance(callback, GradientAccumulationScheduler):
            steps = _scheduled_steps(trainer, callback)
    return int(steps)


def _scheduled_steps(trainer: Trainer, scheduler: GradientAccumulationScheduler) -> float:
    """Return the optimizer steps of a run in which batches are accumulated by epochs.

    Lightning's estimate takes the factor of the present epoch for all of them.
    """
    most = math.inf if trainer.max_steps == -1 else trainer.max_steps
    if trainer.max_epochs in (None, -1) or trainer.num_training_batches == math.inf:
        return most
    epochs = max(trainer.max_epochs, 1)
    starts = [start for start in scheduler.epochs if start < epochs]
    steps = 0
    for start, end in pairwise([*starts, epochs]):
        factor = scheduler.get_accumulate_grad_batches(start)
        steps += (end - start) * math.ceil(trainer.num_training_batches / factor)
    return min(steps, most)


def validate_end(trainer: Trainer) -> None:
    """Check, before the data is there, that the run has an end of which there are shares."""
    if trainer.max_epochs == -1 and trainer.max_steps == -1:
        raise _endless()


def _epochs(text: str) -> int:
    """The number in "3 epochs"; 0 if the text is anything else."""
    found = _EPOCHS.fullmatch(text)
    return int(found[1]) if found else 0


def _endless() -> MisconfigurationException:
    return MisconfigurationException(
        "The number of optimizer steps of this run is not known, so there is no share of it. Set "
        "the Trainer's max_steps, or give optimizer steps or epochs instead: every=500, "
        "draw_by='3 epochs'." + see("tickets")
    )
