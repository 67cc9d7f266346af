"""Finds out which rank of a launched call failed first, and describes how."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lightning_axosparse.distributed.rank_status import RanksStuckError, RankStatus, read_status
from lightning_axosparse.strategy.launcher.call import CallFolder, Failure
from lightning_axosparse.support.troubleshooting import see

_CAN_MONITOR = all(hasattr(os, name) for name in ("pidfd_open", "eventfd"))
_POLL_SECONDS = 0.05  # between two searches for ranks that have not started yet
_GRACE_SECONDS = 5  # for mpiexec to end the other ranks
_CRASHES = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTERM")
_SEE = see("failing-and-waiting-ranks")


@dataclass(frozen=True)
class UnreportedEnd:
    """The end of a rank's process that the rank did not report.

    Attributes:
        when: seconds of the host's clock.
        status: the last status of the rank.
        code: its exit code, or the negative number of the signal that killed it; None if mpiexec
            has already waited for the process.
    """

    when: float
    status: RankStatus
    code: int | None


class RankMonitor:
    """Detects ranks that end without a report, inside its context; stops mpiexec if it goes on.

    Where the system does not notify of the end of processes, it detects nothing.

    Attributes:
        first: the first unreported end, if there was any.
        stopped_mpiexec: whether mpiexec had to be stopped after it.

    Args:
        folder: of the call, where ranks publish their status.
        ranks: number of ranks.
        mpiexec: the process that started them.
    """

    def __init__(self, folder: CallFolder, ranks: int, mpiexec: subprocess.Popen[bytes]) -> None:
        self.first: UnreportedEnd | None = None
        self.stopped_mpiexec = False
        self._folder, self._mpiexec = folder, mpiexec
        self._not_started = set(range(ranks))
        self._statuses: dict[int, RankStatus] = {}  # by the file descriptor of the process
        self._over = threading.Event()
        self._wake = os.eventfd(0) if _CAN_MONITOR else -1
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RankMonitor:
        if _CAN_MONITOR:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _CAN_MONITOR:
            self._over.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for file in (self._wake, *self._statuses):
                os.close(file)

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
                process = os.pidfd_open(status.pid)
            except (OSError, ValueError):  # not yet started, or already ended
                continue
            self._not_started.remove(rank)
            self._statuses[process] = status
            ends.register(process, select.EPOLLIN)

    def _record_end(self, status: RankStatus) -> None:
        if not status.finished and self.first is None:
            code = _exit_code(status.pid)
            self.first = UnreportedEnd(time.time(), RankStatus.from_buffer_copy(status), code)


def _exit_code(pid: int) -> int | None:
    """The exit code of a process that is no child of this one, unless its parent has read it."""
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None


def describe_failure(
    reported: Failure | None, unreported: UnreportedEnd | None, code: int
) -> tuple[str, BaseException | None]:
    """Describe why a call failed, by whatever happened first.

    Args:
        reported: the first failure that a rank reported, if any did.
        unreported: the first end of a rank that it did not report, if there was any.
        code: exit code of mpiexec; 0 if it was stopped because of ``unreported``.

    Returns:
        The message, and the exception of the rank, if it could be pickled.
    """
    if reported is None and code < 0:
        killer = signal.Signals(-code).name
        return f"mpiexec was killed by {killer}, and the ranks with it." + _SEE, None
    if unreported is not None and (reported is None or unreported.when < reported.when):
        status = unreported.status
        end = _by_mpiexec_code(code) if unreported.code is None else _by_code(unreported.code)
        return f"{status.who} {end}\nIt was {status.doing}." + _SEE, None
    if reported is None:
        return f"A rank {_by_mpiexec_code(code)}" + _SEE, None
    if isinstance(reported.exception, RanksStuckError):
        return str(reported.exception), reported.exception
    summary = reported.trace.strip().splitlines()[-1]
    message = f"{reported.rank} failed: {summary}\n\nThere:\n{reported.trace}"
    return message, reported.exception


def _by_mpiexec_code(code: int) -> str:
    """How the rank that ended first did so, as far as the exit code of mpiexec shows it."""
    number = code - 128 if code > 128 else code
    crashed = number in signal.valid_signals() and signal.Signals(number).name in _CRASHES
    other = " Or it left by `os._exit`: mpiexec mixes the exit codes of all ranks."
    return _by_code(-number) + other if crashed else _by_code(code)


def _by_code(code: int) -> str:
    """How a rank ended, by its exit code, which is negative for a signal."""
    if code >= 0:
        return (
            f"ended with exit code {code} before its work was done, as by `os._exit`; its output "
            "above may say why."
        )
    memory = " The kernel does that when memory runs out." if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}.{memory}"
