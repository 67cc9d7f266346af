"""Base class of callbacks that search for a ticket: compares masks and decides when to draw.

When something happens is said by optimizer steps, by epochs or by a share of the run.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.masks import DISTANCES, Distance, MaskBits, MaskWindow
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from lightning_axosparse.support.arguments import COUNT, NONE, Kind, number, one_of, whole
from lightning_axosparse.support.files import restoring
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

    def times(self, interval: When, trainer: Trainer) -> int:
        """Return how often an interval has passed in the trainer's run."""
        if isinstance(interval, str):
            return self.epochs // _epochs(interval)
        return self.steps // in_steps(interval, trainer)


def in_steps(when: float, trainer: Trainer) -> int:
    """Return optimizer steps (an int) as they are, and those of a share of the run (a float)."""
    return max(1, round(when * total_steps(trainer))) if isinstance(when, float) else when


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


Period = Literal["dense", "pruning", "sparse"]
"""What the model is: dense before anything is pruned, sparse or with fewer channels after the draw.
"""

SEARCH = {
    "every": WHEN,
    "draw_after": WHEN | NONE,
    "draw_by": WHEN | NONE,
    "distance": one_of(*DISTANCES),
    "threshold": number("a number in (0, 1]", lambda threshold: 0 < threshold <= 1),
    "window": whole(2),
}
"""The kinds of the arguments of every search."""


class TicketSearch(Callback, ABC):
    """Compares masks at intervals, and draws a ticket when the newest have settled.

    Arguments and attributes are those of ``EarlyBirdTicket`` and ``EarlyBirdChannels``.
    """

    kind: ClassVar[type[Ticket] | type[ChannelTicket]]
    """The class of :attr:`ticket`."""
    lack: ClassVar[str]
    """What other strategies do not do, in words."""

    def __init__(
        self,
        every: When,
        draw_after: When | None,
        draw_by: When | None,
        distance: Distance,
        threshold: float,
        window: int,
        ticket: Ticket | ChannelTicket | str | os.PathLike[str] | None,
    ) -> None:
        self.every, self.draw_after, self.draw_by = every, draw_after, draw_by
        self.distance, self.threshold = distance, threshold
        self.ticket: Any = (
            self.kind.load(ticket) if isinstance(ticket, str | os.PathLike) else ticket
        )
        self.distances: dict[int, float] = {}
        self.drawn_at: int | None = None
        self._window = MaskWindow(window, distance)
        self._looked: Progress | None = None
        """Up to where masks that were due have been compared; None outside of training."""

    @property
    def period(self) -> Period:
        """What the model is now."""
        return "dense" if self.ticket is None else "sparse"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the run on every rank, before any weight changes."""
        self.validate_fit(trainer)

    def validate_fit(self, trainer: Trainer) -> None:
        """Validate strategy, module and callbacks; the launcher calls this before ranks start."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        name = type(self).__name__
        for callback in callbacks_of(trainer):
            if isinstance(callback, _KEEP_OTHER_WEIGHTS) and callback is not self:
                raise MisconfigurationException(
                    f"{type(callback).__name__} keeps dense weights or masks of its own, which do "
                    f"not fit those that {name} leaves. Leave one of the two callbacks out."
                    + see("callbacks")
                )
        if not isinstance(trainer, Trainer):
            raise MisconfigurationException(
                "pytorch_lightning and lightning have the same classes under two names, and an "
                "object of one is none of the other. Write `import lightning.pytorch as pl` in "
                "place of `import pytorch_lightning as pl`, for the module and the Trainer."
                + see("copies")
            )
        if not hasattr(trainer.strategy, "use_freed_memory"):
            raise MisconfigurationException(
                f"{name} needs strategy='axosparse' (AxoSparseStrategy); "
                f"{type(trainer.strategy).__name__} {self.lack}." + see("tickets")
            )
        endless = trainer.max_epochs == -1 and trainer.max_steps == -1
        has_shares = float in map(type, (self.every, self.draw_after, self.draw_by))
        if endless and has_shares and self.ticket is None:
            raise _endless()
        self._validate_before_launch(trainer)

    @abstractmethod
    def _validate_before_launch(self, trainer: Trainer) -> None:
        """Check what this process can know of the module and its optimizers."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare masks that were due where the checkpoint of a resumed run was written.

        It may have been written before this callback's own hook, at the last batch of an epoch, at
        which Lightning does not resume.
        """
        now = Progress(trainer.global_step, trainer.current_epoch)
        if self.drawn_at is not None and now.steps < self.drawn_at:
            self.drawn_at = None  # Another run drew the ticket.
        self._looked = self._looked or now
        self._look(trainer, pl_module, now)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Compare masks if they are due inside an epoch."""
        if not trainer.is_last_batch:
            now = Progress(trainer.global_step, trainer.current_epoch)
            self._look(trainer, pl_module, now, on_step=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare masks if they are due at the end of an epoch, which has been validated."""
        self._look(trainer, pl_module, Progress(trainer.global_step, trainer.current_epoch + 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket and the search for it, but for the masks of the window."""
        return {
            "looked": self._looked and [self._looked.steps, self._looked.epochs],
            "drawn_at": self.drawn_at,
            "ticket": None if self.ticket is None else self.ticket.state_dict(),
            "distances": dict(self.distances),
            "window": [],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the search, or the ticket, from a checkpoint of this or another grid."""
        with restoring(type(self).__name__):
            self._restore(state_dict)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["ticket"] is not None:
            ticket = self.kind.from_state_dict(state["ticket"])
            if self.ticket not in (None, ticket):
                raise MisconfigurationException(
                    "The checkpoint holds another ticket than the one given as `ticket=`. Resume "
                    "without `ticket=`, or start a new run from the weights alone." + see("tickets")
                )
            self.ticket = ticket
        self._looked = state["looked"] and Progress(*state["looked"])
        self.drawn_at = state["drawn_at"]
        self.distances = dict(state["distances"])
        self._window.load_state(state["window"])

    def _look(
        self, trainer: Trainer, module: LightningModule, now: Progress, on_step: bool = False
    ) -> None:
        looked, self._looked = self._looked, now
        if self.ticket is not None:
            return
        assert looked is not None
        late = self._reached(self.draw_by, trainer, now)
        if late or self._is_due(trainer, looked, now):
            self._compare(trainer, module, now, late, on_step)

    def _is_due(self, trainer: Trainer, before: Progress, now: Progress) -> bool:
        """Whether masks are computed now, or were due since an earlier time."""
        return now.times(self.every, trainer) > before.times(self.every, trainer)

    def _compare(
        self, trainer: Trainer, module: LightningModule, now: Progress, late: bool, on_step: bool
    ) -> None:
        """Compare the masks with the window, and draw the ticket if they agree, or it is late."""
        masks, distance = self._new_masks(trainer, module)
        if distance is not None:
            self.distances[now.steps] = distance
            module.log("mask_distance", distance, on_step=on_step, on_epoch=not on_step)
        early = self.draw_after is not None and not self._reached(self.draw_after, trainer, now)
        settled = self._window.full and distance is not None and distance < self.threshold
        if late or (settled and not early):
            self._draw(trainer, module, masks)

    @abstractmethod
    def _new_masks(
        self, trainer: Trainer, module: LightningModule
    ) -> tuple[MaskBits, float | None]:
        """Compute masks, and return them with their distance to the window, into which they go."""

    @abstractmethod
    def _draw(self, trainer: Trainer, module: LightningModule, masks: MaskBits) -> None:
        """Make the masks the ticket of all ranks, and prune by it."""

    def _reached(self, when: When | None, trainer: Trainer, now: Progress) -> bool:
        return when is not None and now.times(when, trainer) > 0

    def _not_settled(self) -> str:
        """Why no ticket was drawn, and of what the masks are judged by."""
        last = f"{[*self.distances.values()][-1]:.3f}" if self.distances else "none"
        return (
            f"the masks have not settled (last mask_distance: {last}, threshold: "
            f"{self.threshold}, window: {self._window.size})"
        )


_KEEP_OTHER_WEIGHTS = (TicketSearch, ModelPruning, StochasticWeightAveraging, WeightAveraging)


@contextmanager
def misconfigured() -> Iterator[None]:
    """Raise what is wrong with a rule, a model or an optimizer as a misconfiguration."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def search_of(trainer: Trainer) -> TicketSearch | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    found = (each for each in callbacks_of(trainer) if isinstance(each, TicketSearch))
    return next(found, None)


def strategy_of(trainer: Trainer) -> AxoSparseStrategy:
    """The trainer's strategy, which :meth:`TicketSearch.validate_fit` has checked."""
    return cast(AxoSparseStrategy, trainer.strategy)


def period_of(trainer: Trainer) -> Period:
    """Return what the model is now."""
    search = search_of(trainer)
    return "dense" if search is None else search.period
