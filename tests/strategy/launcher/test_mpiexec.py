"""What ranks see of the process that starts them."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys

import pytest

from lightning_axosparse.distributed.rank_status import RanksStuckError, RankStatus
from lightning_axosparse.strategy.launcher.call import Failure
from lightning_axosparse.strategy.launcher.mpiexec import (
    JobFailure,
    UnreportedEnd,
    describe_failure,
    environment,
)
from tests.ranks import REPOSITORY


def test_ranks_know_of_the_terminal_and_not_of_another_job(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        at_terminal = environment()
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        captured = environment()
    os.close(ours)
    assert at_terminal["TTY_COMPATIBLE"] == at_terminal["TTY_INTERACTIVE"] == "1"
    assert at_terminal["COLUMNS"] == "70"
    assert "TTY_COMPATIBLE" not in captured
    for variables in (at_terminal, captured):
        assert variables["OMP_WAIT_POLICY"] == "passive"
        assert not {"PMI_RANK", "SLURM_NTASKS"} & set(variables)
        assert variables["HYDRA_FULL_ERROR"] == "1"
        assert str(REPOSITORY) in variables["PYTHONPATH"].split(os.pathsep)


STATUS = RankStatus(rank=1, stage=-1, host=b"node7")
RAISED = Failure(2.0, "rank 0", ValueError("boom"), "Traceback\n  ...\nValueError: boom\n")


def ended(when: float, code: int | None) -> UnreportedEnd:
    return UnreportedEnd(when, STATUS, code)


@pytest.mark.parametrize(
    ("reported", "unreported", "code", "words"),
    [
        (None, None, -signal.SIGKILL, "mpiexec was killed by SIGKILL, and the ranks with it."),
        (None, None, 3, "A rank ended with exit code 3"),
        (None, None, 143, "A rank was killed by SIGTERM. Or it left by `os._exit`"),
        (None, ended(1.0, -signal.SIGTERM), 0, "rank 1 on host node7 was killed by SIGTERM."),
        (None, None, 139, "A rank was killed by SIGSEGV. Or it left by `os._exit`"),
        (None, ended(1.0, -signal.SIGKILL), 0, "rank 1 on host node7 was killed by SIGKILL. The"),
        (None, ended(1.0, 0), 0, "rank 1 on host node7 ended with exit code 0 before its work"),
        (None, UnreportedEnd(1.0, None, None), 1, "A rank ended with exit code 1"),
        (None, UnreportedEnd(1.0, None, None), 255, "The proxy of mpiexec was killed"),
        (None, UnreportedEnd(1.0, None, -signal.SIGKILL), 1, "The proxy of mpiexec was killed"),
        (None, ended(1.0, None), 137, "rank 1 on host node7 was killed by SIGKILL"),
        (RAISED, ended(1.0, -signal.SIGKILL), 0, "rank 1 on host node7 was killed by SIGKILL"),
        (RAISED, ended(3.0, -signal.SIGKILL), 1, "rank 0 failed: ValueError: boom\n\nThere:\nTrac"),
        (RAISED, None, 1, "rank 0 failed: ValueError: boom"),
    ],
)
def test_the_message_describes_what_happened_first(
    reported: Failure | None, unreported: UnreportedEnd | None, code: int, words: str
) -> None:
    failure = describe_failure(reported, unreported, code)
    assert failure.message.startswith(words)
    assert failure.cause is (RAISED.exception if "boom" in words else None)
    assert failure.lost == ("was killed" in words and "SIGTERM" not in words)


def test_ranks_that_wait_for_one_another_have_described_it_themselves() -> None:
    stuck = RanksStuckError("All ranks wait for one another")
    failure = Failure(1.0, "rank 0", stuck, "Traceback")
    assert describe_failure(failure, None, 1) == JobFailure(str(stuck), stuck, lost=False)
