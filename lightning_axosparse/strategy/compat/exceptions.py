"""Ends the job where a rank fails; where all fail at the same point, callbacks save before that."""

from __future__ import annotations

from math import inf
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar

from lightning_axosparse.distributed.mpi.environment import all_arrive
from lightning_axosparse.distributed.rank_status import blocked, this_rank
from lightning_axosparse.strategy.compat.hooks import RankLocalCallback, callbacks_of, overrides

_PATIENCE = 5.0
"""Seconds for which a rank that has failed waits for the others, if a callback may save."""


class JobEnd(RankLocalCallback):
    """Ends the job, before another callback waits for ranks that have not failed."""

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Let callbacks save if that is possible, and end the job."""
        try:
            save_together(trainer, exception)
        except Exception as error:  # Its context is the one that was raised before.
            exception = error
        trainer.strategy.on_exception(exception)


def save_together(trainer: pl.Trainer, exception: BaseException) -> None:
    """Call ``on_exception`` of the user's callbacks, if all ranks have failed at the same point.

    Where a rank alone fails, the others are within a batch: there is no state of the whole model to
    save, and a callback that asked the others for theirs would wait for ever. Where all fail in the
    same hook or for the same batch, as they do for most errors outside of the step, there is one.

    Args:
        trainer: of the run that has failed on this rank.
        exception: what this rank has raised.
    """
    callbacks = [each for each in callbacks_of(trainer) if _acts_on_exceptions(each)]
    position = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx)
    if not callbacks or not all_arrive(position, _PATIENCE):
        return
    this_rank().leaves = True
    for callback in callbacks:
        callback.on_exception(trainer, trainer.lightning_module, exception)
    with blocked("all ranks to save what the exception leaves"):
        all_arrive(position, inf)  # With no integers, MPI need not wait for anyone.


def _acts_on_exceptions(callback: Callback) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    is_others = not isinstance(callback, (RankLocalCallback, ProgressBar))
    return is_others and overrides(callback, "on_exception")
