"""Keeps all ranks at the same position in Lightning's loops, also if one fails or gets a signal.

A rank at another position, or with another number of batches, would take part in the wrong
collective or leave the others waiting. Positions are compared before the first and after the last
batch of a loop, in a process group of their own, so that the comparison never meets another
collective. Before the loops, ranks wait until all have prepared the data.

Lightning's signal handlers call collectives wherever a rank happens to be, which is a deadlock if
ranks wait for one another. Here a handler records the signal, and the ranks act on it before the
next batch. If all ranks fail at the same point, callbacks save before the job ends.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_axosparse.distributed.mpi.environment import all_arrive
from lightning_axosparse.distributed.process_groups import ProcessGroups, all_gather
from lightning_axosparse.distributed.rank_status import blocked, this_rank
from lightning_axosparse.strategy.compat.internals import RankLocalCallback, callbacks_of, overrides
from lightning_axosparse.support.patched import patched
from lightning_axosparse.support.troubleshooting import see


def loops_of(owner: Trainer | _Loop, path: str = "trainer") -> dict[str, Any]:
    """Return the loops of a Trainer, or of a loop, with inner ones, by their attribute paths."""
    loops: dict[str, Any] = {}
    for name, value in vars(owner).items():
        if isinstance(value, _Loop):
            loops |= {f"{path}.{name}": value, **loops_of(value, f"{path}.{name}")}
    return loops


def progress_of(owner: Any) -> dict[str, Any]:
    """Return the attributes of a loop that hold its progress; none of any other object."""
    if not isinstance(owner, _Loop):
        return {}
    kinds = bool | int | float | str | Enum | _BaseProgress
    return {name: value for name, value in vars(owner).items() if isinstance(value, kinds)}


_LOOPS = {
    RunningStage.SANITY_CHECKING: "sanity check",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


def position(trainer: pl.Trainer) -> tuple[str, int, int]:
    """Return the running loop, the index of the epoch, and that of the latest batch."""
    stage = trainer.state.stage
    assert stage is not None
    if stage is RunningStage.TRAINING:
        return "training", trainer.current_epoch, trainer.fit_loop.batch_idx
    loop: Any = trainer._active_loop
    return _LOOPS[stage], trainer.current_epoch, loop.batch_progress.current.ready - 1


@dataclass(frozen=True)
class LoopPosition:
    """The position of a rank in Lightning's loops.

    Attributes:
        who: the rank, in words.
        evaluation_group: ranks with the same number evaluate equally many batches.
        occasion: the beginning or end of a loop, in words.
        loop: the loop that begins or ends.
        batches: number of batches in the loop; None if it begins.
        lengths: number of batches of each of its loaders, ``inf`` if unknown.
        stops: whether ``trainer.should_stop`` is set.
    """

    who: str
    evaluation_group: int
    occasion: str
    loop: str
    batches: int | None
    lengths: tuple[float, ...]
    stops: bool

    def __str__(self) -> str:
        words = f"{self.who}: {self.occasion}"
        if self.batches is not None:
            words += f" after {self.batches} batches"
        if self.lengths:
            numbers = ", ".join("unknown" if n == float("inf") else f"{n:g}" for n in self.lengths)
            words += f", loader length {numbers}"
        return words + (", trainer.should_stop is set" if self.stops else "")


def validate_positions(ranks: Sequence[LoopPosition]) -> None:
    """Check that all ranks are at the same position and have the same number of batches.

    Replicas may evaluate different numbers of batches, as in Lightning's own ``ddp``, if they do
    not share experts.
    """
    listed = "".join(f"\n- {rank}" for rank in ranks)
    if len({rank.occasion for rank in ranks}) > 1:
        raise MisconfigurationException(
            "The ranks are at different positions: a loop has ended on some of them only. Let "
            "`trainer.should_stop`, `on_train_batch_start` and all else that ends or starts a loop "
            f"decide the same on every rank (`trainer.strategy.broadcast` shares a value):{listed}"
            + see("batches")
        )
    if ranks[0].loop != "training":
        groups = {rank.evaluation_group for rank in ranks}
        alike = [[rank for rank in ranks if rank.evaluation_group == group] for group in groups]
    else:
        alike = [list(ranks)]
    for group in alike:
        if len({(rank.batches, rank.lengths) for rank in group}) > 1:
            raise MisconfigurationException(
                f"The ranks have unequal numbers of {ranks[0].loop} batches. Give every stage the "
                "same loader and every replica a loader of the same length (a DistributedSampler "
                "does; `limit_train_batches=` cuts what has no length), and end an epoch on all "
                f"ranks or none:{listed}" + see("batches")
            )


class LoopCheck(RankLocalCallback):
    """Compares the positions of all ranks when a loop begins and when it ends."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare the lengths of the training loaders."""
        self._begin(trainer, [trainer.num_training_batches])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the numbers of batches in the loop."""
        self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare whether training is over."""
        self._compare(trainer, "training ends", None, ())

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the lengths of the loaders of an evaluation."""
        loop: Any = trainer._active_loop
        self._begin(trainer, loop.max_batches)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start
    on_validation_epoch_end = on_train_epoch_end
    on_test_epoch_end = on_train_epoch_end
    on_predict_epoch_end = on_train_epoch_end

    def _begin(self, trainer: pl.Trainer, lengths: Sequence[float]) -> None:
        loop, epoch, _ = position(trainer)
        self._compare(trainer, f"{loop} of epoch {epoch} begins", None, lengths)

    def _end(self, trainer: pl.Trainer) -> None:
        loop, epoch, _ = position(trainer)
        batches = this_rank().end_loop(loop, epoch)
        self._compare(trainer, f"{loop} of epoch {epoch} ends", batches, ())

    def _compare(
        self,
        trainer: pl.Trainer,
        occasion: str,
        batches: int | None,
        lengths: Sequence[float],
    ) -> None:
        this_rank().between_loops(trainer.should_stop)
        loop, _, _ = position(trainer)
        own = LoopPosition(
            this_rank().who,
            self._groups.grid.evaluation_group,
            occasion,
            loop,
            batches,
            tuple(lengths),
            trainer.should_stop,
        )
        validate_positions(all_gather(own, self._groups.loop_ends))


_SEE = see("failing-and-waiting-ranks")


def restore_handlers_in_teardown(trainer: Trainer) -> None:
    """Let the Trainer's teardown restore the present signal handlers.

    On Ctrl-C Lightning ignores further ones, and then restores the handlers that it saved when the
    loops began; if they run in other processes, it has saved none.
    """
    connector = trainer._signal_connector
    connector._original_handlers = connector._get_current_signal_handlers()


@contextmanager
def acting_together(trainer: Trainer) -> Iterator[None]:
    """Inside the context, act on a signal on all ranks before the same batch.

    SIGTERM at any rank ends the run as on one process: callbacks may save. The signal with which
    Slurm announces the end of the job (``SLURMEnvironment(auto_requeue=True)``) saves a checkpoint
    and requeues the job. On SIGTERM, the watchdog ends the job if the ranks do not reach the next
    batch soon.

    Args:
        trainer: the Trainer of a job of several ranks, before it registers its handlers.
    """
    from lightning_axosparse.distributed.mpi.watchdog import watchdog

    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    requeue = connector._slurm_sigusr_handler_fn
    requeued = False

    def record(signum: int, _: Any) -> None:
        this_rank().signal = signum

    def act() -> None:
        nonlocal requeued
        received = watchdog().received_signal() if trainer.global_rank == 0 else None
        shared = torch.tensor([received.signal, received.rank] if received else [0, 0])
        dist.broadcast(shared, src=0)
        signum, rank = shared.tolist()
        if signum == signal.SIGTERM:
            this_rank().leaves = connector.received_sigterm = True
            raise SIGTERMException(f"Rank {rank} received SIGTERM." + _SEE)
        if signum and not requeued:
            requeued = True
            requeue(signum, None)  # type: ignore[arg-type]

    with (
        patched(connector, "_sigterm_notifier_fn", record),
        patched(connector, "_slurm_sigusr_handler_fn", record),
        patched(loop, "_broadcast_sigterm_tensor", act),
    ):
        yield


def cause_of(exception: BaseException) -> BaseException:
    """Return the cause of this rank's end: a SIGTERM received before, or else ``exception``.

    Batch systems send SIGTERM to the workers of its loaders, too, and their end is an exception.
    """
    if this_rank().signal != signal.SIGTERM or isinstance(exception, SIGTERMException):
        return exception
    received = SIGTERMException(f"Rank {this_rank().rank} received SIGTERM." + _SEE)
    received.__cause__ = exception
    return received


def preparing_together() -> AbstractContextManager[None]:
    """Let ranks wait for ``prepare_data`` of others by MPI inside the context.

    Lightning creates a gloo group for that, which needs a store that all hosts share.
    """
    return patched(data_connector, "_InfiniteBarrier", _prepared_together)


@contextmanager
def _prepared_together() -> Iterator[None]:
    yield
    all_arrive(_BEFORE_LOOPS, inf)  # It may take longer than the watchdog lets ranks wait.


_BEFORE_LOOPS = (-1, -1, -1)
"""The position of ranks that :func:`save_together` must not take for that of a batch."""
_PATIENCE = 5.0
"""Seconds for which a failed rank waits for the others, if a callback may save."""


class JobEnd(RankLocalCallback):
    """Ends the job when a rank fails, before another callback waits for the other ranks."""

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Let callbacks save if that is possible, and end the job."""
        try:
            save_together(trainer, exception)
        except Exception as error:  # Its ``__context__`` is the exception before.
            exception = error
        trainer.strategy.on_exception(exception)


def save_together(trainer: pl.Trainer, exception: BaseException) -> None:
    """Call ``on_exception`` of the user's callbacks, if all ranks have failed at the same point.

    If one rank fails alone, the others are within a batch: the whole model has no consistent state,
    and a callback that gathers it would wait for ever. If all ranks fail in the same hook or for
    the same batch, as with most errors outside the step, the state can be saved.
    """
    callbacks = [each for each in callbacks_of(trainer) if _acts_on_exceptions(each)]
    position = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.batch_idx)
    if not callbacks or not all_arrive(position, _PATIENCE):
        return
    this_rank().leaves = True
    for callback in callbacks:
        callback.on_exception(trainer, trainer.lightning_module, exception)
    trainer.strategy.checkpoint_io.teardown()  # A plugin may write in a thread.
    with blocked("all ranks to save what the exception leaves"):
        all_arrive(position, inf)  # With no integers, MPI need not wait for anyone.


def _acts_on_exceptions(callback: Callback) -> bool:
    if isinstance(callback, ModelCheckpoint):
        return bool(callback.save_on_exception)
    is_others = not isinstance(callback, (RankLocalCallback, ProgressBar))
    return is_others and overrides(callback, "on_exception")
