"""Ends a run on its ranks where Lightning's tuner does, as the Trainer does on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.call import _call_teardown_hook
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import _TunerExitException


def run_until_tuned(trainer: Trainer, function: Callable[[], Any]) -> Any:
    """Call a method of the Trainer; ``Tuner.lr_find`` ends ``fit`` by an exception.

    Returns:
        What it returns; None if the tuner has ended it.
    """
    try:
        return function()
    except _TunerExitException:
        _call_teardown_hook(trainer)
        trainer._teardown()
        trainer.state.status, trainer.state.stage = TrainerStatus.FINISHED, None
        return None
