"""The callback that multiplies the learning rates from a moment of the run on, without pruning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_axosparse.callbacks.moments import (
    WHEN,
    Moment,
    Progress,
    When,
    total_steps,
    validate_end,
)
from lightning_axosparse.support.arguments import FUNCTION, POSITIVE, checked
from lightning_axosparse.support.troubleshooting import see


class LearningRateFactor(Callback):
    """Multiplies the learning rates from a moment of the run on, under any scheduler.

    ``EarlyBirdTicket(learning_rate_factor=2)`` does so when it draws a ticket. A dense run with
    this callback has the same rates at the same steps, so it tells what the pruning itself did: it
    is the control. The factor is logged as ``learning_rate_factor``; schedulers do not see it.

    Args:
        factor: a number, or a function of the optimizer steps since then.
        after: when it begins: after so many optimizer steps (an int), a share of the run (a float),
            or epochs (such as "3 epochs").

    Raises:
        MisconfigurationException: if an argument is out of range.
    """

    @checked(MisconfigurationException, factor=POSITIVE | FUNCTION, after=WHEN)
    def __init__(self, factor: float | Callable[[int], float] = 2.0, after: When = 0.25) -> None:
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
            MisconfigurationException: if the strategy cannot multiply rates, or there is no share
                of a run without an end.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if not hasattr(type(trainer.strategy), "learning_rate_factor"):
            raise MisconfigurationException(
                "LearningRateFactor needs strategy='axosparse' (AxoSparseStrategy); "
                f"{type(trainer.strategy).__name__} does not multiply learning rates."
                + see("callbacks")
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
        steps = trainer.global_step
        if self._began_at is None:
            moment = Moment.of(self.after, partial(total_steps, trainer))
            if not moment.reached(Progress(steps, trainer.current_epoch)):
                return
            self._began_at = steps
        factor = self.factor(steps - self._began_at) if callable(self.factor) else self.factor
        strategy: Any = trainer.strategy
        strategy.learning_rate_factor = factor
        pl_module.log("learning_rate_factor", factor, on_step=True, on_epoch=False)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"began_at": self._began_at}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._began_at = state_dict["began_at"]
