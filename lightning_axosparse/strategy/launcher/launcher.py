"""Runs a Trainer's call on new ranks, with the same effects as a call in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.mpi.environment import check_can_start
from lightning_axosparse.strategy.compat.internals import (
    attach_datamodule,
    callbacks_of,
    with_given_loader,
)
from lightning_axosparse.strategy.compat.lockstep import restore_handlers_in_teardown
from lightning_axosparse.strategy.launcher import fork_server, mpiexec
from lightning_axosparse.strategy.launcher.call import Call, ProcessState, origin_of_main
from lightning_axosparse.strategy.launcher.changes import read_tensors
from lightning_axosparse.strategy.launcher.failure import call_error
from lightning_axosparse.strategy.launcher.pickling import first_unpicklable, load, save
from lightning_axosparse.support.files import temporary_folder
from lightning_axosparse.support.troubleshooting import see

_SEE = see("failing-and-waiting-ranks")


@runtime_checkable
class ValidatesFit(Protocol):
    """A strategy or callback that detects errors before the launch."""

    def validate_fit(self, trainer: Trainer) -> None:
        """Raise if the trainer, its module or its callbacks cannot work."""


class MPILauncher(_Launcher):
    """Starts ranks by ``mpiexec`` for each call; between calls there are none.

    The call and all objects to which it refers are copied to every rank. Afterwards the weights of
    all ranks, and rank 0's metrics, progress and the changed attributes of the module, the
    callbacks, the loggers and the datamodule are copied into the caller's own objects.

    The files of a call are in a temporary folder::

        call                        the call, by the caller
        result                      the result of rank 0
        status-STUB, weights-RANK   the status and the weights of each rank
        done-STUB or failure-STUB   how a rank has ended, by the rank
        ends                        a line for each rank that has written neither, by its guard
    """

    def __init__(self, strategy: Strategy, processes: int) -> None:
        self._strategy = strategy
        self._processes = processes
        self.ranks_failed = False
        """Whether the last call has failed on its ranks, so that its effects were not copied."""
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
            Exception: the exception of a rank, if it can be pickled.
            RankFailedError: if a rank has failed in another way.
            MisconfigurationException: if there is no MPI, or the call cannot be pickled.
        """
        check_can_start(self._processes)
        if trainer is not None:
            with with_given_loader(trainer, args):
                for part in (self._strategy, *callbacks_of(trainer)):
                    if isinstance(part, ValidatesFit):
                        part.validate_fit(trainer)
            restore_handlers_in_teardown(trainer)
        state = ProcessState.of_this_process()
        call = Call(function, args, kwargs, trainer, state, origin_of_main())
        with _terminate_ranks_first():
            return self._run_call(call)

    def _run_call(self, call: Call) -> Any:
        """Run a call on ranks, and return the result of rank 0."""
        named = call.named_objects
        with temporary_folder() as folder:
            self._save(call, folder / "call")
            (folder / "ends").touch()
            self.ranks_failed = True
            self._run_ranks(folder)
            value, changes, state = load(folder / "result", named)
            state.restore()
            if call.trainer is not None:
                changes.apply(named)
                self._read_weights(call.trainer, folder)
        self.ranks_failed = False
        return value

    def _read_weights(self, trainer: Trainer, folder: Path) -> None:
        if trainer.lightning_module is not None:
            for rank in range(self._processes):
                read_tensors(folder / f"weights-{rank}", trainer.lightning_module)
            trainer.strategy.connect(trainer.lightning_module)
            attach_datamodule(trainer)

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks, if they are running."""
        if self._mpiexec is not None and self._mpiexec.poll() is None:
            self._mpiexec.send_signal(signum)

    def _save(self, call: Call, file: Path) -> None:
        self._strategy._launcher = None  # The ranks call the function themselves.
        try:
            save(call, file)
        except Exception as error:
            raise _unpicklable(call, error) from error
        finally:
            self._strategy._launcher = self

    def _run_ranks(self, folder: Path) -> None:
        """Run the worker on every rank until all have ended."""
        outputs = [mpiexec.Output(sys.stdout), mpiexec.Output(sys.stderr)]
        command = fork_server.rank_command(folder)
        self._mpiexec = process = mpiexec.start(self._processes, command, outputs)
        try:
            code = mpiexec.wait(process, outputs, folder)
        except BaseException as interruption:
            terminated = isinstance(interruption, _Terminated)
            signum = signal.SIGTERM if terminated else signal.SIGINT
            mpiexec.stop(process, outputs, signum, folder)
            raise
        finally:
            self._mpiexec = None
        if code != 0 or not (folder / "result").exists():
            raise call_error(folder, code)


class _Terminated(SystemExit):
    """This process has received SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def _terminate_ranks_first() -> Iterator[None]:
    """On SIGTERM inside the context, end the ranks before the signal has its usual effect."""
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
    roots = {**call.named_objects, "the call": (call.function, call.args, call.kwargs)}
    path, value = first_unpicklable(roots) or ("the call", call.function)
    return MisconfigurationException(
        f"The call cannot be copied to its ranks: {path} cannot be pickled. It is a "
        f"{type(value).__qualname__} ({error}). Make it in a hook, which runs on the ranks "
        "(`setup`, `on_fit_start`, `train_dataloader`), or leave it out in `__getstate__`."
        + see("copies")
    )
