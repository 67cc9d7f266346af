"""Lets all ranks act together on the signals that Lightning handles, and puts back their handlers.

Lightning's handlers call collectives wherever a rank happens to be, which is a deadlock where ranks
wait for one another. Here a handler notes the signal; the ranks act on it before the next batch.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_axosparse.distributed.rank_status import this_rank
from lightning_axosparse.support.troubleshooting import see

_SEE = see("failing-and-waiting-ranks")


def restore_handlers_in_teardown(trainer: Trainer) -> None:
    """Let the Trainer's teardown set the handlers of signals that there are now.

    On Ctrl-C Lightning ignores further ones, and puts back what it has saved when the loops began;
    where they run on other processes, it has saved nothing.
    """
    connector = trainer._signal_connector
    connector._original_handlers = connector._get_current_signal_handlers()


@contextmanager
def acting_together(trainer: Trainer) -> Iterator[None]:
    """Inside the context, act on a signal on all ranks before the same batch.

    SIGTERM at any rank ends the run as on one process: callbacks may save. The signal by which
    Slurm announces the end of the job (``SLURMEnvironment(auto_requeue=True)``) saves a checkpoint
    and requeues the job. Where the ranks do not come to a next batch soon, the watchdog ends the
    job on SIGTERM.

    Args:
        trainer: of a job of several ranks, before it registers its handlers.
    """
    from lightning_axosparse.distributed.mpi.watchdog import watchdog

    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    requeue = connector._slurm_sigusr_handler_fn
    requeued = False

    def note(signum: int, _: Any) -> None:
        this_rank().signal = signum

    def act() -> None:
        nonlocal requeued
        received = watchdog().received() if trainer.global_rank == 0 else None
        noted = torch.tensor([received.signal, received.rank] if received else [0, 0])
        dist.broadcast(noted, src=0)
        signum, rank = noted.tolist()
        if signum == signal.SIGTERM:
            this_rank().leaves = connector.received_sigterm = True
            raise SIGTERMException(f"Rank {rank} received SIGTERM." + _SEE)
        if signum and not requeued:
            requeued = True
            requeue(signum, None)  # type: ignore[arg-type]

    replaced = (
        (connector, "_sigterm_notifier_fn", note),
        (connector, "_slurm_sigusr_handler_fn", note),
        (loop, "_broadcast_sigterm_tensor", act),
    )
    for owner, name, function in replaced:
        vars(owner)[name] = function
    try:
        with watchdog().wakeup.by_signals():
            yield
    finally:
        for owner, name, _ in replaced:
            del vars(owner)[name]


def cause_of(exception: BaseException) -> BaseException:
    """What has ended this rank: the SIGTERM that it received before, or else ``exception``.

    Batch systems send SIGTERM to the workers of its loaders, too, and their end is an exception.
    """
    if this_rank().signal != signal.SIGTERM or isinstance(exception, SIGTERMException):
        return exception
    received = SIGTERMException(f"Rank {this_rank().rank} received SIGTERM." + _SEE)
    received.__cause__ = exception
    return received
