"""Launcher: runs a Trainer's call on ranks of its own and makes it look as if it ran right here."""

from __future__ import annotations

import codecs
import io
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol, TextIO, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_axosparse.mpi.changes import known_objects
from lightning_axosparse.mpi.deaths import Death, Deaths
from lightning_axosparse.mpi.environment import check_mpi_available, find_mpiexec
from lightning_axosparse.mpi.job import Answer, Job, JobFolder, ProcessState
from lightning_axosparse.mpi.pickling import first_unpicklable, load, save
from lightning_axosparse.whereabouts import RanksStuckError

# What tells a process that it is a rank already; new ranks must not believe it.
_RANK_VARIABLES = (
    "PMI_",
    "PMIX_",
    "PALS_",
    "HYDI_",
    "MPI_LOCAL",
    "MV2_COMM_WORLD_",
    "JSM_NAMESPACE_",
    "OMPI_COMM_WORLD_",
    "OMPI_WORLD_",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_NUM_APP_CTX",
    "OMPI_FILE_LOCATION",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte",
    "OMPI_MCA_num_procs",
    "OMPI_MCA_initial_wdir",
    "PRTE_LAUNCHED",
    "SLURM_",
)
# Open MPI 5 and 4: as MPICH does, start more ranks than cores and leave them unbound, with the
# workers of their data loaders.
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
_WORKER = (sys.executable, "-m", "lightning_axosparse.mpi.worker")
_GRACE_SECONDS = 5
_CRASHES = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTERM")


class RankFailedError(RuntimeError):
    """A rank failed and ended the job.

    The message names the rank, its stage and its replica and holds its traceback; ``__cause__`` is
    the exception that it raised. Of a rank that was killed it says where it was, and of ranks that
    wait for one another where each is.
    """


@runtime_checkable
class RefusesUnfit(Protocol):
    """A strategy or callback that can tell in the caller what would fail on every rank."""

    def refuse_unfit(self, trainer: Trainer) -> None:
        """Raise if the trainer, its module or its callbacks cannot work."""


class MPILauncher(_Launcher):
    """Starts ranks by ``mpiexec`` for each call, and none between calls.

    The call and everything it refers to is copied to every rank. Afterwards rank 0's weights,
    metrics, progress and the attributes that changed in the module, the callbacks, the loggers and
    the datamodule are put into the caller's own objects.

    Args:
        strategy: the strategy that launches.
        processes: number of ranks, all on this node.
    """

    def __init__(self, strategy: Strategy, processes: int) -> None:
        self._strategy = strategy
        self._processes = processes
        self._mpiexec: subprocess.Popen[bytes] | None = None

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
        """Call ``function(*args, **kwargs)`` on every rank and return what rank 0 returned.

        Raises:
            RankFailedError: if a rank raised, or died.
            MisconfigurationException: if there is no MPI, or the call cannot be pickled.
        """
        check_mpi_available()
        if trainer is not None:
            for part in (self._strategy, *vars(trainer)["callbacks"]):
                if isinstance(part, RefusesUnfit):
                    part.refuse_unfit(trainer)
        job = Job(self._processes, function, args, kwargs, trainer, ProcessState.of_this_process())
        known = known_objects(trainer, (*args, *kwargs.values())) if trainer else {}
        with _sigterm_raises(), JobFolder.temporary() as folder:
            self._write(job, folder)
            self._run(folder)
            answer: Answer = load(folder.answer, known)
        answer.state.restore()
        if trainer is not None:
            answer.changes.redo(known)
            if trainer.lightning_module is not None:
                trainer.strategy.connect(trainer.lightning_module)
        return answer.result

    def kill(self, signum: int) -> None:
        """Send a signal to the ranks, if any run."""
        if self._mpiexec is not None and self._mpiexec.poll() is None:
            self._mpiexec.send_signal(signum)

    def _write(self, job: Job, folder: JobFolder) -> None:
        self._strategy._launcher = None  # The ranks call the function themselves.
        try:
            save(job, folder.job)
        except Exception as error:
            raise _unpicklable(job, error) from error
        finally:
            self._strategy._launcher = self

    def _run(self, folder: JobFolder) -> None:
        command = [str(find_mpiexec()), "-n", str(self._processes), *_WORKER, str(folder.path)]
        outputs = [_Output(sys.stdout), _Output(sys.stderr)]
        self._mpiexec = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0].child_end,
            stderr=outputs[1].child_end,
            env=_environment(),
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once.
        )
        try:
            with Deaths(folder, self._processes, process) as deaths:
                _relay(process, outputs)
                code = process.wait()
        except BaseException as interruption:
            _stop(
                process, signal.SIGTERM if isinstance(interruption, _Terminated) else signal.SIGINT
            )
            raise
        if code != 0 or not folder.answer.exists():
            raise self._failure(folder, deaths.first, 0 if deaths.ended_job else code)

    def _failure(self, folder: JobFolder, death: Death | None, code: int) -> RankFailedError:
        first = folder.first_failure()
        if first is None and code < 0:
            killer = signal.Signals(-code).name
            return RankFailedError(f"mpiexec was killed by {killer}, and the ranks with it.")
        if death is not None and (first is None or death.when < first.when):
            end = _crash(code) if death.code is None else _end(death.code)
            return RankFailedError(f"{death.place.who} {end}\nIt was {death.place.doing}.")
        if first is None:
            return RankFailedError(f"A rank {_crash(code)}")
        words = str(first.exception)
        if not isinstance(first.exception, RanksStuckError):
            kind = first.trace.strip().splitlines()[-1]
            words = f"{first.where} failed: {kind}\n\nThere:\n{first.trace}"
        error = RankFailedError(words)
        error.__cause__ = first.exception
        return error


class _Terminated(SystemExit):
    """SIGTERM has come."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the ranks before it does here what it would have done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(*_: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate) or signal.SIG_DFL
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


class _Output:
    """One of this process's output streams, as the ranks write to it.

    They get the stream's own file where it has one; a notebook's or a captured stream is written
    here, with what comes through a pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self.child_end = _file_number(stream)
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        self._stream.write(self._decoder.decode(data, final=not data))
        self._stream.flush()


def _file_number(stream: TextIO) -> int:
    if isinstance(stream, io.TextIOWrapper):
        try:
            return stream.fileno()
        except OSError:
            pass
    return subprocess.PIPE


def _relay(process: subprocess.Popen[bytes], outputs: list[_Output]) -> None:
    """Write what comes through pipes until they close, or the process ends and they are empty."""
    pipes: list[IO[bytes] | None] = [process.stdout, process.stderr]
    with selectors.DefaultSelector() as selector:
        for pipe, output in zip(pipes, outputs, strict=True):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, output)
        while selector.get_map():
            ready = selector.select(timeout=0.5)
            if not ready and process.poll() is not None:
                return
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                key.data.write(data)
                if not data:
                    selector.unregister(key.fileobj)


def _stop(process: subprocess.Popen[bytes], signum: int) -> None:
    """Ask the ranks to end, then insist."""
    process.send_signal(signum)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    environment = _OPEN_MPI | kept
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if sys.stdout.isatty() and _file_number(sys.stdout) != subprocess.PIPE:
        # The ranks write to a terminal through mpiexec's pipe, and cannot see that it is one.
        columns, lines = shutil.get_terminal_size()
        terminal = {
            "TTY_COMPATIBLE": "1",
            "TTY_INTERACTIVE": "1",
            "COLUMNS": str(columns),
            "LINES": str(lines),
        }
        environment = terminal | environment
    return environment


def _unpicklable(job: Job, error: Exception) -> MisconfigurationException:
    known = known_objects(job.trainer, (*job.args, *job.kwargs.values())) if job.trainer else {}
    roots = {**known, "the call": (job.function, job.args, job.kwargs)}
    path, value = first_unpicklable(roots) or ("the call", job.function)
    return MisconfigurationException(
        f"The call cannot be copied to its ranks: {path} cannot be pickled. It is a "
        f"{type(value).__qualname__} ({error}). Make it in a hook, which runs on the ranks "
        "(`setup`, `on_fit_start`, `train_dataloader`), or leave it out in `__getstate__`."
    )


def _crash(code: int) -> str:
    """What an exit code of mpiexec tells of the rank that ended first."""
    number = code - 128 if code > 128 else code
    crashed = number in signal.valid_signals() and signal.Signals(number).name in _CRASHES
    other = " Or it left by `os._exit`: mpiexec mixes the exit codes of all ranks."
    return _end(-number) + other if crashed else _end(code)


def _end(code: int) -> str:
    """What the exit code of a rank that left no word tells; negative for a signal."""
    if code >= 0:
        return (
            f"ended with exit code {code} before its work was done, as by `os._exit`; its output "
            "above may say why."
        )
    memory = " The kernel does that when memory runs out." if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}.{memory}"
