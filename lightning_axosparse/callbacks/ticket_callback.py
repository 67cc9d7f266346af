"""The base of callbacks that prune: stores the ticket, and calls the subclass after each step.

Subclasses define when masks are computed, and whether weights or channels are pruned.
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
from lightning_axosparse.callbacks.times import Progress, When, unknown_length_error
from lightning_axosparse.pruning.channel_ticket import ChannelTicket
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.strategy.compat.internals import callbacks_of, trains_on_a_stream
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from lightning_axosparse.support.files import restoring
from lightning_axosparse.support.troubleshooting import see

Period = Literal["dense", "pruning", "sparse"]
"""A part of the training: before anything is pruned, between the first masks and the draw, after
the draw. After the draw of a ticket of channels, the model is dense and has fewer channels.
"""


class TicketCallback(Callback, ABC):
    """Prunes by a ticket that it draws while training, or that the user gives.

    Attributes:
        ticket: the ticket once it is drawn or given, else None; the same on every rank.
        drawn_at: number of optimizer steps before the draw; None if this run has drawn no ticket.
        search: the comparison of masks at intervals; None if masks are not compared.
    """

    ticket_class: ClassVar[type[Ticket] | type[ChannelTicket]]
    """The class of :attr:`ticket`."""
    refusal: ClassVar[str]
    """The end of the error message for other strategies, such as "cannot remove channels"."""
    search: MaskSearch | None = None

    def __init__(self, ticket: Ticket | ChannelTicket | str | os.PathLike[str] | None) -> None:
        self.ticket: Any = (
            self.ticket_class.load(ticket) if isinstance(ticket, str | os.PathLike) else ticket
        )
        self.drawn_at: int | None = None
        self._is_drawn = False
        """Whether the ticket was drawn in some run, rather than given by the user."""
        self._is_evaluated = False
        """Whether the checkpoint that is loaded is only evaluated."""
        self._last: Progress | None = None
        """All masks that were due up to here have been computed; None outside of training."""

    @property
    def period(self) -> Period:
        """The period of the training."""
        return "dense" if self.ticket is None else "sparse"

    @property
    def distances(self) -> dict[int, float]:
        """Number of optimizer steps -> the mask distance after them; empty without a search."""
        return {} if self.search is None else self.search.distances

    @property
    def _times(self) -> tuple[When | None, ...]:
        """The times of the arguments, such as ``every``, at which masks are computed."""
        return () if self.search is None else (self.search.every, self.search.draw_by)

    @abstractmethod
    def _validate_before_launch(self, trainer: Trainer) -> None:
        """Validate the module and its optimizers, as far as they exist before the launch."""

    @abstractmethod
    def _act(self, trainer: Trainer, before: Progress, now: Progress, on_step: bool) -> None:
        """Prune or draw the ticket if that was due after ``before``, up to ``now``.

        Args:
            trainer: the trainer.
            before: the progress at the last call.
            now: the progress at this call.
            on_step: whether values are logged as those of a step; else as those of an epoch.
        """

    @abstractmethod
    def _not_drawn(self, steps: int) -> str:
        """Return the warning that no ticket was drawn in the optimizer steps of the run."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Validate the run on every rank, before any weight changes."""
        self._last, self._is_evaluated = None, False
        self.validate_fit(trainer)

    def validate_fit(self, trainer: Trainer) -> None:
        """Validate strategy, module and callbacks; the launcher calls this before ranks start."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        name = type(self).__name__
        for callback in callbacks_of(trainer):
            if isinstance(callback, _CONFLICTING) and callback is not self:
                raise MisconfigurationException(
                    f"{type(callback).__name__} keeps dense weights or masks of its own, which do "
                    f"not fit those that {name} leaves. Leave one of the two callbacks out."
                    + see("callbacks")
                )
        if not isinstance(trainer.strategy, AxoSparseStrategy):
            raise MisconfigurationException(
                f"{name} needs strategy='axosparse' (AxoSparseStrategy); "
                f"{type(trainer.strategy).__name__} {self.refusal}." + see("tickets")
            )
        has_end = trainer.max_epochs != -1 and not trains_on_a_stream(trainer)
        needs_end = float in map(type, self._times) and self.ticket is None
        if needs_end and not has_end and trainer.max_steps == -1:
            raise unknown_length_error()
        self._validate_before_launch(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute masks that were due when the checkpoint of a resumed run was written.

        At the last batch of an epoch, another callback may write a checkpoint before this one
        computes masks. A run that resumes from it begins with the next batch.
        """
        now = Progress(trainer.global_step, trainer.current_epoch)
        if self.drawn_at is not None and now.steps < self.drawn_at:
            self.drawn_at = None
            rank_zero_warn(
                f"{type(self).__name__} prunes from the start of this run, by the ticket that it "
                "drew in an earlier one. A new callback would draw another." + see("tickets")
            )
        if self._last is None:  # It resumes from no checkpoint.
            self._last = now
        else:
            self._act_if_due(trainer, now)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Compute masks if they are due inside an epoch."""
        if not trainer.is_last_batch:
            now = Progress(trainer.global_step, trainer.current_epoch)
            self._act_if_due(trainer, now, on_step=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compute masks if they are due at the end of an epoch, which has been validated."""
        self._act_if_due(trainer, Progress(trainer.global_step, trainer.current_epoch + 1))

    def _act_if_due(self, trainer: Trainer, now: Progress, on_step: bool = False) -> None:
        before, self._last = self._last, now
        if self.ticket is None:
            assert before is not None
            self._act(trainer, before, now, on_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if no ticket was drawn."""
        self._last = None
        if self.ticket is None:
            rank_zero_warn(self._not_drawn(trainer.global_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the ticket, and the progress up to which masks have been computed.

        A search adds its distances, and the subclass the masks of its window.
        """
        searched = {} if self.search is None else self.search.state_dict()
        return {
            **searched,
            "last": self._last and [self._last.steps, self._last.epochs],
            "drawn_at": self.drawn_at,
            "ticket": None if self.ticket is None else self.ticket.state_dict(),
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Note whether the checkpoint is only evaluated: Lightning restores callbacks then, too."""
        self._is_evaluated = trainer.state.fn != TrainerFn.FITTING

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state from a checkpoint of this or another grid, to resume from it."""
        if not self._is_evaluated:
            with restoring(type(self).__name__):
                self._restore(state_dict)

    def _restore(self, state: Mapping[str, Any]) -> None:
        if self._is_drawn:
            self.ticket = None
        self._is_drawn = self.ticket is None
        if state["ticket"] is not None:
            ticket = self.ticket_class.from_state_dict(state["ticket"])
            if self.ticket not in (None, ticket):
                raise MisconfigurationException(
                    "The checkpoint holds another ticket than the one given as `ticket=`. Resume "
                    "without `ticket=`, or start a new run from the weights alone." + see("tickets")
                )
            self.ticket = ticket
        self._last = state["last"] and Progress(*state["last"])
        self.drawn_at = state["drawn_at"]
        if self.search is not None:
            self.search.load_state(state)


_CONFLICTING = (TicketCallback, ModelPruning, StochasticWeightAveraging, WeightAveraging)


@contextmanager
def misconfigured() -> Iterator[None]:
    """Raise errors of a rule, a model or an optimizer as misconfigurations."""
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(str(error)) from error


def ticket_callback_of(trainer: Trainer) -> TicketCallback | None:
    """Return the trainer's callback that draws a ticket, if there is one."""
    callbacks = (each for each in callbacks_of(trainer) if isinstance(each, TicketCallback))
    return next(callbacks, None)


def strategy_of(trainer: Trainer) -> AxoSparseStrategy:
    """Return the trainer's strategy, whose type :meth:`TicketCallback.validate_fit` has checked."""
    return cast(AxoSparseStrategy, trainer.strategy)


def period_of(trainer: Trainer) -> Period:
    """Return the period of the training."""
    callback = ticket_callback_of(trainer)
    return "dense" if callback is None else callback.period
