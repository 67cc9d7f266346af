"""Starts ranks by mpiexec, shows their output, stops them, and finds out which failed first."""

from __future__ import annotations

import codecs
import io
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from lightning_axosparse.distributed.mpi.environment import find_mpiexec
from lightning_axosparse.distributed.rank_status import (
    RanksStuckError,
    RankStatus,
    describe_end,
    exit_code,
    read_status,
)
from lightning_axosparse.strategy.launcher.call import CallFolder, Failure
from lightning_axosparse.support.troubleshooting import see

# Prefixes of variables that a launcher sets for its ranks; the new ranks must not see them.
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
# Idle threads of torch would spin, on cores that other ranks and sparse products use.
_IDLE_THREADS = {"OMP_WAIT_POLICY": "passive"}
# Open MPI 5 and 4 start more ranks than cores only with these variables. Like MPICH, they then do
# not bind a rank and its data loader workers to a core.
_OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
# All ranks are on this host: the listeners of UCX and libfabric need not be seen by others.
_LOOPBACK = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"} if sys.platform == "linux" else {}
_GRACE_SECONDS = 5  # for mpiexec to end the ranks

_CAN_MONITOR = all(hasattr(os, name) for name in ("pidfd_open", "eventfd"))
_POLL_SECONDS = 0.05  # between two searches for ranks that have not started yet
_CRASHES = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
_WITHOUT_PROXY = (0, 255)
"""Exit codes of mpiexec that has lost its proxy: if it was stopped then, and by itself."""
_SEE = see("failing-and-waiting-ranks")


class Output:
    """An output stream of this process, as the ranks write to it.

    They write to its file where it has one. For the stream of a notebook, or a captured one, they
    write to a pipe, and this process writes what it reads there.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self.target = _file_number(stream)
        """Where mpiexec writes: a file number or ``subprocess.PIPE``."""
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        """Write what was read from the pipe; no bytes mean its end."""
        self._stream.write(self._decoder.decode(data, final=not data))
        self._stream.flush()


def start(ranks: int, command: Sequence[str], outputs: Sequence[Output]) -> subprocess.Popen[bytes]:
    """Start ``command`` on so many ranks of this node."""
    stdout, stderr = outputs
    return subprocess.Popen(
        [str(find_mpiexec()), "-n", str(ranks), *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout.target,
        stderr=stderr.target,
        env=environment(),
        start_new_session=True,  # Ctrl-C reaches this process only, which sends it to the ranks.
    )


def relay(process: subprocess.Popen[bytes], outputs: Sequence[Output]) -> None:
    """Write the data of the pipes, until they are closed or the process has ended."""
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


def stop(process: subprocess.Popen[bytes], signum: int, ranks_leave: Callable[[], bool]) -> None:
    """Send a signal to mpiexec, which sends it to the ranks; kill it if it does not end.

    Ranks that leave in agreement get the time that they take.
    """
    process.send_signal(signum)
    while True:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            if ranks_leave():
                continue
            process.kill()
            process.wait()
        return


def environment() -> dict[str, str]:
    """The environment variables of the ranks."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    variables = _OPEN_MPI | _IDLE_THREADS | _LOOPBACK | kept
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if sys.stdout.isatty() and _file_number(sys.stdout) != subprocess.PIPE:
        # The ranks write to a pipe of mpiexec, and cannot see that a terminal shows their output.
        columns, lines = shutil.get_terminal_size()
        terminal = {
            "TTY_COMPATIBLE": "1",
            "TTY_INTERACTIVE": "1",
            "COLUMNS": str(columns),
            "LINES": str(lines),
        }
        variables = terminal | variables
    return variables


def _file_number(stream: TextIO) -> int:
    if isinstance(stream, io.TextIOWrapper):
        try:
            return stream.fileno()
        except OSError:
            pass
    return subprocess.PIPE


@dataclass(frozen=True)
class UnreportedEnd:
    """The end of a rank's process that the rank did not report.

    Attributes:
        when: seconds of the host's clock.
        status: the last status of the rank; None if it is the proxy of mpiexec that has ended.
        code: its exit code, or the negative number of the signal that killed it; None if mpiexec
            has already waited for the process.
    """

    when: float
    status: RankStatus | None
    code: int | None


class RankMonitor:
    """Detects ranks that end without a report, inside its context; stops mpiexec if it goes on.

    Where the system does not notify of the end of processes, it detects nothing.
    """

    def __init__(self, folder: CallFolder, ranks: int, mpiexec: subprocess.Popen[bytes]) -> None:
        self.first: UnreportedEnd | None = None
        self.stopped_mpiexec = False
        self._folder, self._mpiexec = folder, mpiexec
        self._not_started = set(range(ranks))
        self._proxy = 0
        self._statuses: dict[int, RankStatus | None] = {}  # by the file of the process; proxy: None
        self._over = threading.Event()
        self._wake = os.eventfd(0) if _CAN_MONITOR else -1
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RankMonitor:
        if _CAN_MONITOR:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if _CAN_MONITOR:
            self._over.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for file in (self._wake, *self._statuses):
                os.close(file)

    @property
    def ranks_leave(self) -> bool:
        """Whether ranks have agreed to end, and save what the run leaves."""
        return any(status is not None and status.leaves for status in self._statuses.values())

    def _run(self) -> None:
        with select.epoll() as ends:
            ends.register(self._wake, select.EPOLLIN)
            while self.first is None:
                self._find_started(ends)
                # The events have the order in which the processes ended.
                for file, _ in ends.poll(_POLL_SECONDS if self._not_started else None):
                    if file == self._wake:
                        return
                    ends.unregister(file)
                    self._record_end(self._statuses[file])
        if not self._over.wait(_GRACE_SECONDS):
            self.stopped_mpiexec = True
            self._mpiexec.terminate()
            if not self._over.wait(_GRACE_SECONDS):
                self._mpiexec.kill()

    def _find_started(self, ends: select.epoll) -> None:
        for rank in list(self._not_started):
            try:
                status = read_status(str(self._folder.status(rank)))
                if status.proxy and None not in self._statuses.values():
                    self._proxy = status.proxy
                    self._add(ends, os.pidfd_open(status.proxy), None)
                process = os.pidfd_open(status.pid)
            except (OSError, ValueError):  # not yet started, or already ended
                continue
            self._not_started.remove(rank)
            self._add(ends, process, status)

    def _add(self, ends: select.epoll, process: int, status: RankStatus | None) -> None:
        self._statuses[process] = status
        ends.register(process, select.EPOLLIN)

    def _record_end(self, status: RankStatus | None) -> None:
        if self.first is not None or (status is not None and status.finished):
            return
        if status is None:
            code = exit_code(self._proxy)
            if code is None or code < 0:
                self.first = UnreportedEnd(time.time(), None, code)
        else:
            copy = RankStatus.from_buffer_copy(status)
            self.first = UnreportedEnd(time.time(), copy, exit_code(status.pid))


@dataclass(frozen=True)
class JobFailure:
    """Why a call has failed.

    Attributes:
        message: in words.
        cause: the exception of a rank, if it could be pickled.
        lost: whether a process was killed, so that the call may succeed when it begins again.
    """

    message: str
    cause: BaseException | None = None
    lost: bool = False


def describe_failure(
    reported: Failure | None, unreported: UnreportedEnd | None, code: int
) -> JobFailure:
    """Describe why a call failed, by whatever happened first.

    ``code`` is that of mpiexec; 0 if it was stopped because of ``unreported``.
    """
    if unreported is not None and (unreported.status, unreported.code) == (None, None):
        # Unless mpiexec has lost its proxy, that has ended as it should, after a rank.
        unreported = unreported if code in _WITHOUT_PROXY else None
    if reported is None and code < 0:
        killer = signal.Signals(-code).name
        return JobFailure(
            f"mpiexec was killed by {killer}, and the ranks with it." + _SEE, lost=_is_crash(code)
        )
    if unreported is not None and (reported is None or unreported.when < reported.when):
        status = unreported.status
        if status is None:
            message = "The proxy of mpiexec was killed, and its ranks with it."
            return JobFailure(message + _SEE, lost=True)
        known = unreported.code
        end = _by_mpiexec_code(code) if known is None else describe_end(known)
        lost = _is_crash(_signal_in(code) if known is None else known)
        return JobFailure(f"{status.who} {end}\nIt was {status.doing}." + _SEE, lost=lost)
    if reported is None:
        lost = _is_crash(_signal_in(code))
        return JobFailure(f"A rank {_by_mpiexec_code(code)}" + _SEE, lost=lost)
    if isinstance(reported.exception, RanksStuckError):
        return JobFailure(str(reported.exception), reported.exception)
    summary = reported.trace.strip().splitlines()[-1]
    message = f"{reported.rank} failed: {summary}\n\nThere:\n{reported.trace}"
    return JobFailure(message, reported.exception)


def _by_mpiexec_code(code: int) -> str:
    """How the rank that ended first did so, as far as the exit code of mpiexec shows it."""
    killer = _signal_in(code)
    other = " Or it left by `os._exit`: mpiexec mixes the exit codes of all ranks."
    return describe_end(killer) + other if killer < 0 else describe_end(code)


def _signal_in(code: int) -> int:
    """The negative number of the signal that an exit code of mpiexec shows; 0 for none."""
    number = code - 128 if code > 128 else code
    return -number if _is_crash(-number) or number == signal.SIGTERM else 0


def _is_crash(code: int) -> bool:
    """Whether an exit code is that of a process that was killed, and not asked to end."""
    return -code in signal.valid_signals() and signal.Signals(-code).name in _CRASHES
