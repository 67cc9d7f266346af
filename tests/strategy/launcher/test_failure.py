"""The error of a call says what happened first, and shows the user's own lines."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from lightning_axosparse.distributed.rank_status import RanksStuckError, RankStatus
from lightning_axosparse.strategy.launcher.failure import FailureReport, RankFailedError, call_error

RAISED = FailureReport(2.0, "rank 0", ValueError("boom"), "ValueError: boom", [], "Traceback\n")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the files of tracebacks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a call in which only the rank of one stub has begun."""
    status = RankStatus(rank=1, stage=-1, host=b"node7")
    (tmp_path / "call").mkdir()
    (tmp_path / "call" / "status-11").write_bytes(bytes(status))
    (tmp_path / "call" / "ends").touch()
    return tmp_path / "call"


@pytest.mark.parametrize(
    ("reported", "ended", "code", "words"),
    [
        (None, {}, -signal.SIGKILL, "mpiexec was killed by SIGKILL, and the ranks with it."),
        (None, {}, 3, "mpiexec ended with exit code 3"),
        (None, {"11": (1.0, -signal.SIGTERM)}, 0, "rank 1 on host node7 was killed by SIGTERM."),
        (None, {"11": (1.0, -signal.SIGKILL)}, 9, "rank 1 on host node7 was killed by SIGKILL. T"),
        (None, {"11": (1.0, 0)}, 0, "rank 1 on host node7 ended with exit code 0 before its work"),
        (None, {"10": (1.0, 3), "11": (2.0, -9)}, 3, "A rank ended with exit code 3"),
        (None, {"10": (3.0, 3), "11": (2.0, -9)}, 3, "rank 1 on host node7 was killed by SIGKILL"),
        (None, {"mpiexec": (1.0, -9), "11": (2.0, -9)}, 255, "The proxy of mpiexec was killed"),
        (RAISED, {"11": (1.0, -signal.SIGKILL)}, 1, "rank 1 on host node7 was killed by SIGKILL"),
    ],
)
def test_the_message_describes_what_happened_first(
    reported: FailureReport | None,
    ended: dict[str, tuple[float, int]],
    code: int,
    words: str,
    folder: Path,
) -> None:
    if reported is not None:
        reported.write(folder, "10")
    for name, (when, how) in ended.items():
        with (folder / "ends").open("a") as file:
            file.write(f"{when} {how} {name}\n")
    error = call_error(folder, code)
    assert isinstance(error, RankFailedError)
    assert str(error).startswith(words)


def test_the_first_exception_is_raised_if_no_rank_was_killed_before(folder: Path) -> None:
    RAISED.write(folder, "10")
    FailureReport(3.0, "rank 1", OSError("late"), "OSError: late", [], "Traceback\n").write(
        folder, "11"
    )
    (folder / "ends").write_text("4.0 -9 12\n")
    error = call_error(folder, 1)
    assert repr(error) == repr(ValueError("boom"))


def test_ranks_that_wait_for_one_another_have_described_it_themselves() -> None:
    error = FailureReport.of(RanksStuckError("All ranks wait for one another"), "rank 0").error()
    assert isinstance(error, RankFailedError)
    assert str(error) == "All ranks wait for one another"


def raised(exception: BaseException) -> FailureReport:
    try:
        (Path("/") / "no such folder" / "file").read_bytes()
    except OSError as error:
        try:
            raise exception from error
        except BaseException as caught:
            return FailureReport.of(caught, "rank 1 (stage 0 of replica 0)")


def test_an_exception_comes_back_with_the_users_frames_and_a_file_of_all(tmp_path: Path) -> None:
    error = raised(ValueError("first line\nlast line")).error()
    assert type(error) is ValueError
    assert str(error) == "first line\nlast line"
    (note,) = error.__notes__
    place, frame, line, where = note.splitlines()
    assert place == "On rank 1 (stage 0 of replica 0):"
    assert re.fullmatch(rf'  File "{re.escape(__file__)}", line \d+, in raised', frame)
    assert line.strip() == "raise exception from error"
    (file,) = tmp_path.iterdir()
    assert where == f"All frames are in '{file}'."
    assert "FileNotFoundError" in file.read_text()
    assert "pathlib.py" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_of_code_that_is_not_the_users_the_last_frames_are_shown() -> None:
    try:
        os.fspath(Path("/no such folder").read_bytes())
    except OSError as error:
        report = FailureReport.of(error, "rank 0")
    frames = [frame for frame in report.frames if frame[0] != __file__]
    assert frames
    error = FailureReport(1.0, "rank 0", ValueError(), "ValueError", frames, "Traceback").error()
    assert error.__notes__[0].count("  File ") == len(frames[-3:])


class Stubborn(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize(
    ("exception", "headline"),
    [
        (Stubborn("first\nlast"), f"{__name__}.Stubborn: first\nlast"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_what_cannot_be_raised_again_is_described(exception: BaseException, headline: str) -> None:
    error = raised(exception).error()
    assert isinstance(error, RankFailedError)
    start = f"rank 1 (stage 0 of replica 0) failed: {headline}\n\nOn rank 1 "
    assert str(error).startswith(start)
    assert str(error).count("  File ") == 1
    assert "All frames are in" in str(error)
