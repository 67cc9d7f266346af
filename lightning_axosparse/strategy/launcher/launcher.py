"""Runs a Trainer's call on ranks of its own, with the effects of a call in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_axosparse.distributed.mpi.environment import check_can_start
from lightning_axosparse.strategy.compat.internals import callbacks_of
from lightning_axosparse.strategy.compat.lockstep import restore_handlers_in_teardown
from lightning_axosparse.strategy.launcher import fork_server, mpiexec
from lightning_axosparse.strategy.launcher.call import (
    Call,
    CallFolder,
    CallResult,
    MainModule,
    ProcessState,
    SavedCheckpoint,
    noted_checkpoints,
    resumed_from,
)
from lightning_axosparse.strategy.launcher.changes import read
from lightning_axosparse.strategy.launcher.mpiexec import RankMonitor, describe_failure
from lightning_axosparse.strategy.launcher.pickling import first_unpicklable, load, save
from lightning_axosparse.support.troubleshooting import see, without_link

_WORKER = "lightning_axosparse.strategy.launcher.worker"
_SEE = see("failing-and-waiting-ranks")


class RankFailedError(RuntimeError):
    """A rank failed and ended the job.

    The message names the rank, its stage and its replica and has its traceback; ``__cause__`` is
    the exception that it raised. If the rank was killed, the message says what it did then; if
    ranks wait for one another, what each does.
    """


@runtime_checkable
class ValidatesFit(Protocol):
    """A strategy or callback that can detect before the launch what would fail on every rank."""

    def validate_fit(self, trainer: Trainer) -> None:
        """Raise if the trainer, its module or its callbacks cannot work."""


class MPILauncher(_Launcher):
    """Starts ranks by ``mpiexec`` for each call; between calls there are none.

    The call and all objects that it refers to are copied to every rank. Afterwards the weights of
    all ranks, and rank 0's metrics, progress and the changed attributes of the module, the
    callbacks, the loggers and the datamodule are written into the caller's own objects.
    """

    def __init__(self, strategy: Strategy, processes: int, restarts: int = 0) -> None:
        self._strategy = strategy
        self._processes = processes
        self._restarts = restarts
        self.ranks_failed = False
        """Whether the last call has failed on its ranks, so that its effects are not here."""
        self._mpiexec: subprocess.Popen[bytes] | None = None
        fork_server.prepare()

    @property
    def is_interactive_compatible(self) -> bool:
        """True: notebooks may launch."""
        return True

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``function(*args, **kwargs)`` on every rank and return the result of rank 0.

        Raises:
            RankFailedError: if a rank raised an exception or died.
            MisconfigurationException: if there is no MPI, or the call cannot be pickled.
        """
        check_can_start(self._processes)
        if trainer is not None:
            for part in (self._strategy, *callbacks_of(trainer)):
                if isinstance(part, ValidatesFit):
                    part.validate_fit(trainer)
            restore_handlers_in_teardown(trainer)
        call = Call(
            function,
            args,
            kwargs,
            trainer,
            ProcessState.of_this_process(),
            MainModule.of_this_process(),
        )
        with _terminate_ranks_first():
            restart, saved = 0, list[SavedCheckpoint]()
            while True:
                try:
                    return self._attempt(call)
                except _RankLost as lost:
                    restart += 1
                    if restart > self._restarts:
                        raise lost.error from None
                    saved = [*lost.saved, *saved]
                    which = f"Restart {restart} of {self._restarts}"
                    call = _restarted(call, lost.error, saved, which)

    def _attempt(self, call: Call) -> Any:
        """Run a call on ranks, and return the result of rank 0."""
        known = call.known_objects
        with CallFolder.temporary() as folder:
            self._write(call, folder)
            self.ranks_failed = True
            self._run(folder)
            result: CallResult = load(folder.result, known)
            result.state.restore()
            if call.trainer is not None:
                result.changes.apply(known)
                self._read_weights(call.trainer, folder)
        self.ranks_failed = False
        return result.value

    def _read_weights(self, trainer: Trainer, folder: CallFolder) -> None:
        if trainer.lightning_module is not None:
            for rank in range(self._processes):
                read(folder.weights(rank), trainer.lightning_module)
            trainer.strategy.connect(trainer.lightning_module)

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks, if any are running."""
        if self._mpiexec is not None and self._mpiexec.poll() is None:
            self._mpiexec.send_signal(signum)

    def _write(self, call: Call, folder: CallFolder) -> None:
        self._strategy._launcher = None  # The ranks call the function themselves.
        try:
            save(call, folder.call)
        except Exception as error:
            raise _unpicklable(call, error) from error
        finally:
            self._strategy._launcher = self

    def _run(self, folder: CallFolder) -> None:
        """Run the worker on every rank, until all have ended."""
        outputs = [mpiexec.Output(sys.stdout), mpiexec.Output(sys.stderr)]
        with fork_server.rank_command() as python:
            command = [*python, _WORKER, str(folder.path)]
            self._mpiexec = process = mpiexec.start(self._processes, command, outputs)
            with RankMonitor(folder, self._processes, process) as monitor:
                try:
                    mpiexec.relay(process, outputs)
                    code = process.wait()
                except BaseException as interruption:
                    terminated = isinstance(interruption, _Terminated)
                    signum = signal.SIGTERM if terminated else signal.SIGINT
                    mpiexec.stop(process, signum, lambda: monitor.ranks_leave)
                    raise
                finally:
                    self._mpiexec = None
        if code != 0 or not folder.result.exists():
            code = 0 if monitor.stopped_mpiexec else code
            failure = describe_failure(folder.first_failure(), monitor.first, code)
            error = RankFailedError(failure.message)
            if failure.lost:
                raise _RankLost(error, noted_checkpoints(folder.checkpoints))
            raise error from failure.cause


class _RankLost(Exception):
    """A rank was killed."""

    def __init__(self, error: RankFailedError, saved: Sequence[SavedCheckpoint]) -> None:
        super().__init__(error, saved)
        self.error, self.saved = error, saved


def _restarted(
    call: Call, lost: RankFailedError, saved: Sequence[SavedCheckpoint], which: str
) -> Call:
    """The call that goes on from the newest whole checkpoint of its run; says so."""
    newest = next((each for each in saved if each.is_whole), None)
    where = "where it had begun, as it has saved no whole checkpoint"
    if newest is not None and call.trainer is not None and call.trainer.training:
        newest.keep_folders(call.trainer)
        call = replace(call, args=resumed_from(newest.path, call.function, call.args))
        where = f"'{newest.path}'"
    reason = without_link(lost)
    rank_zero_warn(f"{reason}. {which}: from {where}." + _SEE)
    return call


class _Terminated(SystemExit):
    """This process has received SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def _terminate_ranks_first() -> Iterator[None]:
    """On SIGTERM, let the ranks end before the signal has its usual effect in this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate) or signal.SIG_DFL
    try:
        yield
    except _Terminated:
        message = "This process received SIGTERM, and has ended its ranks." + _SEE
        sys.stderr.write(f"[axosparse] {message}\n")
        sys.stderr.flush()
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _unpicklable(call: Call, error: Exception) -> MisconfigurationException:
    roots = {**call.known_objects, "the call": (call.function, call.args, call.kwargs)}
    path, value = first_unpicklable(roots) or ("the call", call.function)
    return MisconfigurationException(
        f"The call cannot be copied to its ranks: {path} cannot be pickled. It is a "
        f"{type(value).__qualname__} ({error}). Make it in a hook, which runs on the ranks "
        "(`setup`, `on_fit_start`, `train_dataloader`), or leave it out in `__getstate__`."
        + see("copies")
    )
