"""How the failure of a call is described; real ranks fail in test_launcher and in tests/faults."""

from __future__ import annotations

import signal

import pytest

from lightning_axosparse.distributed.rank_status import RanksStuckError, RankStatus
from lightning_axosparse.strategy.launcher.call import Failure
from lightning_axosparse.strategy.launcher.failures import (
    JobFailure,
    UnreportedEnd,
    describe_failure,
)

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
