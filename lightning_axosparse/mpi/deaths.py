"""Deaths: which rank's process ended first without leaving word, and where it was then."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lightning_axosparse.mpi.job import JobFolder
from lightning_axosparse.whereabouts import Whereabouts, read

_CAN_WATCH = all(hasattr(os, name) for name in ("pidfd_open", "eventfd"))
_LOOK_SECONDS = 0.05  # between looks for ranks that have not started yet
_GRACE_SECONDS = 5  # for mpiexec to end the other ranks


@dataclass(frozen=True)
class Death:
    """The end of a process that left no word.

    Attributes:
        when: seconds of the host's clock.
        place: where the rank was.
        code: its exit code, or the negative number of the signal that killed it; None if whoever
            waits for the process was told first.
    """

    when: float
    place: Whereabouts
    code: int | None


class Deaths:
    """Watches the processes of a job, inside the context; ends a job that goes on without one.

    Where the system cannot tell of a process's end, there is none to be known of.

    Attributes:
        first: the first end without word, if there was any.
        ended_job: whether mpiexec had to be stopped after it.

    Args:
        folder: of the job, where ranks show where they are.
        ranks: number of ranks.
        mpiexec: what started them.
    """

    def __init__(self, folder: JobFolder, ranks: int, mpiexec: subprocess.Popen[bytes]) -> None:
        self.first: Death | None = None
        self.ended_job = False
        self._folder, self._mpiexec = folder, mpiexec
        self._unseen = set(range(ranks))
        self._places: dict[int, Whereabouts] = {}
        self._over = threading.Event()
        self._wake = os.eventfd(0) if _CAN_WATCH else -1
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Deaths:
        if _CAN_WATCH:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _CAN_WATCH:
            self._over.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            for file in (self._wake, *self._places):
                os.close(file)

    def _watch(self) -> None:
        with select.epoll() as ends:
            ends.register(self._wake, select.EPOLLIN)
            while self.first is None:
                self._find(ends)
                # Ends are told in the order in which they happened.
                for file, _ in ends.poll(_LOOK_SECONDS if self._unseen else None):
                    if file == self._wake:
                        return
                    ends.unregister(file)
                    self._note(self._places[file])
        if not self._over.wait(_GRACE_SECONDS):
            self.ended_job = True
            self._mpiexec.terminate()
            if not self._over.wait(_GRACE_SECONDS):
                self._mpiexec.kill()

    def _find(self, ends: select.epoll) -> None:
        for rank in list(self._unseen):
            try:
                place = read(str(self._folder.whereabouts(rank)))
                process = os.pidfd_open(place.pid)
            except (OSError, ValueError):  # not there yet, or gone already
                continue
            self._unseen.remove(rank)
            self._places[process] = place
            ends.register(process, select.EPOLLIN)

    def _note(self, place: Whereabouts) -> None:
        if not place.left and self.first is None:
            code = _exit_code(place.pid)
            self.first = Death(time.time(), Whereabouts.from_buffer_copy(place), code)


def _exit_code(pid: int) -> int | None:
    """How a process ended that is not a child of this one, while nobody has waited for it."""
    try:
        state, *_, status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None
