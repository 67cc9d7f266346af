"""Finds why a call has failed: by reports of its ranks, and by how other processes ended."""

from __future__ import annotations

import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from lightning_axosparse.distributed.rank_status import RanksStuckError, describe_end, read_status
from lightning_axosparse.strategy.launcher.pickling import can_be_copied, load, save
from lightning_axosparse.support.troubleshooting import see

_SEE = see("failing-and-waiting-ranks")
_PACKAGE = str(Path(__file__).parents[2])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_REPORT_SECONDS = 1.0  # for guards to note how ranks have ended, as mpiexec does not wait for them
_FRAMES = 3  # shown of a traceback without frames of the user's code


class RankFailedError(RuntimeError):
    """A rank was killed, waits in vain, or has raised an exception that cannot be copied.

    Other exceptions of ranks are raised again in the caller. The message names the rank, its stage
    and its replica. If the rank was killed, it says what the rank was doing; if ranks wait for one
    another, what each is doing.
    """


@dataclass(frozen=True)
class FailureReport:
    """The report of a rank on the exception that ended it.

    Attributes:
        when: seconds of the host's clock; the first failure is the cause of the others.
        rank: describes the rank.
        exception: the exception; None if it cannot be pickled, or is one that ends a process.
        headline: its class and message.
        frames: file, line number and function of each frame of its traceback.
        trace: the whole traceback, as text; empty if the message says everything.
    """

    when: float
    rank: str
    exception: Exception | None
    headline: str
    frames: list[tuple[str, int, str, None]]
    trace: str

    @classmethod
    def of(cls, exception: BaseException, rank: str) -> FailureReport:
        """Create the report of a rank that has just caught ``exception``."""
        if isinstance(exception, RanksStuckError):
            return cls(time.time(), rank, None, str(exception), [], "")
        returns = isinstance(exception, Exception) and can_be_copied(exception, {})
        frames = traceback.extract_tb(exception.__traceback__)
        return cls(
            time.time(),
            rank,
            cast(Exception, exception) if returns else None,
            "".join(traceback.format_exception_only(exception)).strip(),
            [(frame.filename, frame.lineno or 0, frame.name, None) for frame in frames],
            "".join(traceback.format_exception(exception)),
        )

    def write(self, folder: Path, name: str) -> None:
        """Write the report into the folder of the call, for the rank whose stub has this name."""
        partial = folder / f"partial-{name}"
        save(self, partial)
        partial.rename(folder / f"failure-{name}")

    def error(self) -> Exception:
        """Return the exception for the caller, with the rank and the frames of the user's code."""
        if not self.trace:
            return RankFailedError(self.headline)
        own_frames = [frame for frame in self.frames if _is_users(frame[0])]
        shown = own_frames or self.frames[-_FRAMES:]
        # Formatted here and not on the rank, as only this process has the cells of a notebook.
        lines = "".join(traceback.StackSummary.from_list(shown).format())
        file, path = tempfile.mkstemp(prefix="axosparse-traceback-", suffix=".txt")
        with open(file, "w") as whole:
            whole.write(self.trace)
        where = f"On {self.rank}:\n{lines}All frames are in '{path}'."
        if self.exception is None:
            return RankFailedError(f"{self.rank} failed: {self.headline}\n\n{where}{_SEE}")
        if hasattr(self.exception, "add_note"):
            self.exception.add_note(where)
        else:  # before Python 3.11
            sys.stderr.write(f"[axosparse] {where}\n")
        return self.exception


def _is_users(file: str) -> bool:
    packages = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return not packages and not file.startswith((_PACKAGE, _STANDARD_LIBRARY, "<frozen "))


def call_error(folder: Path, code: int) -> Exception:
    """Return the exception for the caller of a failed call: the one that happened first.

    Args:
        folder: of the call.
        code: the exit code of mpiexec; 0 if it was stopped because a process had ended.
    """
    deadline = time.monotonic() + _REPORT_SECONDS
    while time.monotonic() < deadline:
        reports: list[FailureReport] = [load(file) for file in folder.glob("failure-*")]
        ends = [line.split() for line in (folder / "ends").read_text().splitlines()]
        if reports or ends or code < 0:
            break
        time.sleep(_REPORT_SECONDS / 20)
    report = min(reports, key=lambda report: report.when, default=None)
    if report is None and code < 0:
        killer = signal.Signals(-code).name
        message = f"mpiexec was killed by {killer}, and the ranks with it."
        return RankFailedError(message + _SEE)
    end = min(ends, key=lambda end: float(end[0]), default=None)
    if end is not None and (report is None or float(end[0]) < report.when):
        return _error_without_report(folder, int(end[1]), name=end[2])
    if report is not None:
        return report.error()
    return RankFailedError(f"mpiexec ended with exit code {code}: see its output above." + _SEE)


def _error_without_report(folder: Path, code: int, name: str) -> RankFailedError:
    """Return the error for a process that has neither finished nor reported an exception."""
    if name == "mpiexec":
        message = "The proxy of mpiexec was killed, and its ranks with it."
        return RankFailedError(message + _SEE)
    message, file = f"A rank {describe_end(code)}", folder / f"status-{name}"
    if file.exists():
        status = read_status(str(file))
        message = f"{status.who} {describe_end(code)}\nIt was {status.activity}."
    return RankFailedError(message + _SEE)
