"""The callback that multiplies the learning rates from a moment of the run on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_axosparse.callbacks.ticket_search import search_of
from lightning_axosparse.callbacks.trainer_info import require_strategy, strategy_of
from lightning_axosparse.callbacks.triggers import (
    WHEN,
    Moment,
    Progress,
    When,
    total_steps,
    validate_end,
)
from lightning_axosparse.support.arguments import FUNCTION, POSITIVE, checked, one_of
from lightning_axosparse.support.corrupt_file import restoring
from lightning_axosparse.support.troubleshooting import see


class LearningRateFactor(Callback):
    """Multiplies the learning rates from a moment of the run on, under any scheduler.

    A dense run that multiplies them after as many steps as another before its draw has the same
    rates, so it tells what the pruning itself did: it is the control. The factor is logged as
    ``learning_rate_factor``; schedulers and their monitors do not see it.

    Args:
        factor: a number, or a function of the optimizer steps since then, such as ``lambda step:
            min(2.0, step / 50)`` for a new warm-up.
        after: when it begins: "draw": when ``EarlyBirdTicket`` or ``EarlyBirdChannels`` draws its
            ticket in this run, so never with a ticket that is given; else after so many optimizer
            steps (an int), a share of the run (a float), or epochs (such as "3 epochs").

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    @checked(MisconfigurationException, factor=POSITIVE | FUNCTION, after=one_of("draw") | WHEN)
    def __init__(
        self,
        factor: float | Callable[[int], float] = 2.0,
        after: Literal["draw"] | When = "draw",
    ) -> None:
        self.factor = factor
        self.after = after
        self._began_at: int | None = None
        """Optimizer steps of this run before it began; None before."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.validate_fit(trainer)

    def validate_fit(self, trainer: Trainer) -> None:
        """Validate the strategy and the run; the launcher calls this before it starts ranks.

        Raises:
            MisconfigurationException: if the strategy cannot multiply rates, no callback draws a
                ticket, or there is no share of a run without an end.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        require_strategy(trainer, self, "does not multiply learning rates")
        if self.after == "draw" and search_of(trainer) is None:
            raise MisconfigurationException(
                "LearningRateFactor(after='draw') begins when a ticket is drawn, but no callback "
                "draws one. Add EarlyBirdTicket, or give optimizer steps, a share of the run or "
                "epochs, such as after=0.25." + see("callbacks")
            )
        if isinstance(self.after, float):
            validate_end(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._began_at is not None and trainer.global_step < self._began_at:
            self._began_at = None  # It began in another run.

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        began = self._began(trainer)
        if began is None or self.factor == 1:
            return
        steps = trainer.global_step - began
        factor = self.factor(steps) if callable(self.factor) else self.factor
        strategy_of(trainer).learning_rate_factor = factor
        pl_module.log("learning_rate_factor", factor, on_step=True, on_epoch=False)

    def _began(self, trainer: Trainer) -> int | None:
        """Return the optimizer steps of this run before it began; None before."""
        if self.after == "draw":
            search = search_of(trainer)
            assert search is not None
            return search.drawn_at
        if self._began_at is None:
            moment = Moment.of(self.after, partial(total_steps, trainer))
            if moment.reached(Progress(trainer.global_step, trainer.current_epoch)):
                self._began_at = trainer.global_step
        return self._began_at

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"began_at": self._began_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with restoring("LearningRateFactor"):
            self._began_at = state_dict["began_at"]
