"""The base of callbacks that prune: holds the ticket, and asks after each step for the next masks.

Subclasses say when masks are computed, and whether weights or channels are pruned.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_axosparse.callbacks.mask_search import MaskSearch
from lightning_axosparse.callbacks.times import Progress, When, endless
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from lightning_axosparse.support.files import restoring
from lightning_axosparse.support.troubleshooting import see

Period = Literal["dense", "pruning", "sparse"]
"""The state of a model: dense before anything is pruned, sparse or with fewer channels after the
draw.
"""


class TicketCallback(Callback, ABC):
    """Prunes by a ticket that it draws while training, or that it was given.

    Attributes:
        ticket: the ticket once it is drawn or given, else None; the same on every rank.
        drawn_at: number of optimizer steps of this run before the draw; None if it has drawn none.
        search: the search for masks that have settled; None if there is none.
    """

    kind: ClassVar[type[Ticket] | type[ChannelTicket]]
    """The class of :attr:`ticket`."""
    lack: ClassVar[str]
    """Why other strategies are refused, in words."""
    search: MaskSearch | None = None

    def __init__(self, ticket: Ticket | ChannelTicket | str | os.PathLike[str] | None) -> None:
        self.ticket: Any = (
            self.kind.load(ticket) if isinstance(ticket, str | os.PathLike) else ticket
        )
        self.drawn_at: int | None = None
        self._looked: Progress | None = None
        """Up to where masks that were due have been computed; None outside of training."""

    @property
    def period(self) -> Period:
        """The state of the model now."""
        return "dense" if self.ticket is None else "sparse"

    @property
    def distances(self) -> dict[int, float]:
        """Number of optimizer steps -> the distance that a search has measured after them."""
        return {} if self.search is None else self.search.distances

    @property
    @abstractmethod
    def _times(self) -> tuple[When | None, ...]:
        """When it acts."""

    @abstractmethod
    def _validate_before_launch(self, trainer: Trainer) -> None:
        """Check as much of the module and its optimizers as this process knows."""

    @abstractmethod
    def _act(self, trainer: Trainer, before: Progress, now: Progress, on_step: bool) -> None:
        """Prune or draw the ticket if that is due now, or was due since an earlier time.

        ``on_step`` says whether values are logged as those of a step, not of an epoch.
        """

    @abstractmethod
    def _not_drawn(self, steps: int) -> str:
        """Return the warning that no ticket was drawn in so many optimizer steps."""

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
        if not isinstance(trainer.strategy, AxoSparseStrategy):
            raise MisconfigurationException(
                f"{name} needs strategy='axosparse' (AxoSparseStrategy); "
                f"{type(trainer.strategy).__name__} {self.lack}." + see("tickets")
            )
        is_endless = trainer.max_epochs == -1 and trainer.max_steps == -1
        if is_endless and float in map(type, self._times) and self.ticket is None:
            raise endless()
        self._validate_before_launch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute masks that were due where the checkpoint of a resumed run was written.

        It may have been written before this callback's own hook, at the last batch of an epoch, at
        which Lightning does not resume.
        """
        now = Progress(trainer.global_step, trainer.current_epoch)
        if self.drawn_at is not None and now.steps < self.drawn_at:
            self.drawn_at = None  # Another run drew the ticket.
        self._looked = self._looked or now
        self._look(trainer, now)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Compute masks if they are due inside an epoch."""
        if not trainer.is_last_batch:
            now = Progress(trainer.global_step, trainer.current_epoch)
            self._look(trainer, now, on_step=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute masks if they are due at the end of an epoch, which has been validated."""
        self._look(trainer, Progress(trainer.global_step, trainer.current_epoch + 1))

    def _look(self, trainer: Trainer, now: Progress, on_step: bool = False) -> None:
        before, self._looked = self._looked, now
        if self.ticket is None:
            assert before is not None
            self._act(trainer, before, now, on_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no ticket was drawn."""
        self._looked = None
        if self.ticket is None:
            rank_zero_warn(self._not_drawn(trainer.global_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket, and how far the run has come."""
        return {
            "looked": self._looked and [self._looked.steps, self._looked.epochs],
            "drawn_at": self.drawn_at,
            "ticket": None if self.ticket is None else self.ticket.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint of this or another grid."""
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


_KEEP_OTHER_WEIGHTS = (TicketCallback, ModelPruning, StochasticWeightAveraging, WeightAveraging)


@contextmanager
def misconfigured() -> Iterator[None]:
    """Raise errors of a rule, a model or an optimizer as misconfigurations."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def ticket_callback_of(trainer: Trainer) -> TicketCallback | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    found = (each for each in callbacks_of(trainer) if isinstance(each, TicketCallback))
    return next(found, None)


def strategy_of(trainer: Trainer) -> AxoSparseStrategy:
    """The trainer's strategy, which :meth:`TicketCallback.validate_fit` has checked."""
    return cast(AxoSparseStrategy, trainer.strategy)


def period_of(trainer: Trainer) -> Period:
    """Return the state of the model now."""
    callback = ticket_callback_of(trainer)
    return "dense" if callback is None else callback.period
