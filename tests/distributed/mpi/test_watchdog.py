"""What ends a wait, and what ranks that share no memory know of each other."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.mpi import watchdog
from lightning_axosparse.distributed.mpi.watchdog import Peer, Watchdog
from lightning_axosparse.distributed.rank_status import BackOff, RankStatus, this_rank
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="this system does not tell of other processes' ends"
)


def near(where: RankStatus, folder: Path) -> Peer:
    """A rank of this node that has published where it is, and whose process runs."""
    where.token = 7
    published = folder / "status"
    published.write_bytes(bytes(where))
    peer = Peer(1, "host", str(published), 7, os.getpid())
    assert peer.process is not None
    return peer


def far(where: RankStatus) -> Peer:
    """A rank of another node, that has sent where it is."""
    peer = Peer(1, "host", "", 0, os.getpid())
    assert peer.process is None
    peer.status = where
    return peer


def watch(peer: Peer, ticks: int, timeout: float = 1e9, stopped: float = 0) -> str:
    """Why a rank that waits, beside this one, gives up within so many seconds.

    The other rank waits for as long as this one, and was last seen a number of seconds ago.
    """
    dog = Watchdog([peer], MPI.COMM_SELF)
    dog.timeout = timeout
    reasons = []
    this_rank().begin_wait("something")
    try:
        for _ in range(ticks):
            assert peer.status is not None
            peer.status.beat = time.monotonic() - stopped
            reasons.append(dog.look(1.0))
            peer.status.waited = this_rank().waited
    finally:
        this_rank().end_wait()
    return next(filter(None, reasons), "")


def test_a_deadlock_ends_before_the_timeout(tmp_path: Path) -> None:
    waits, ticks = near(RankStatus(rank=1, waits=True), tmp_path), int(watchdog.DEADLOCK_SECONDS)
    assert watch(waits, ticks - 1) == ""
    waits = near(RankStatus(rank=1, waits=True), tmp_path)
    assert "All ranks wait" in watch(waits, ticks + 2)


def test_what_may_be_a_slow_transfer_is_no_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SINGLE)  # It sends no messages.
    ticks = 3 * int(watchdog.DEADLOCK_SECONDS)
    assert watch(near(RankStatus(rank=1, waits=True, bulk=True), tmp_path), ticks) == ""
    assert watch(far(RankStatus(rank=1, waits=True)), ticks) == ""


def test_a_rank_that_computes_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    assert watch(near(RankStatus(rank=1), tmp_path), 100) == ""
    reason = watch(near(RankStatus(rank=1), tmp_path), 100, timeout=90)
    assert "timeout=90 s" in reason


def test_a_stopped_rank_does_not_count_as_waiting(tmp_path: Path) -> None:
    waits, ticks = RankStatus(rank=1, waits=True), 2 * int(watchdog.DEADLOCK_SECONDS)
    assert "All ranks wait" in watch(near(waits, tmp_path), ticks)
    assert watch(near(waits, tmp_path), ticks, stopped=10) == ""


def test_a_rank_that_has_returned_is_waited_for_in_vain(tmp_path: Path) -> None:
    returned = near(RankStatus(rank=1, finished=True), tmp_path)
    ticks = 2 * int(watchdog.DEADLOCK_SECONDS)
    assert "All ranks wait" in watch(returned, ticks, stopped=1000)


def test_a_wait_that_goes_on_begins_again(tmp_path: Path) -> None:
    peer, ticks = near(RankStatus(rank=1), tmp_path), 100
    dog = Watchdog([peer], MPI.COMM_SELF)
    dog.timeout = 50
    for _ in range(ticks):
        this_rank().begin_wait("one of many things")
        assert dog.look(1.0) == dog.look(1.0) == ""
    this_rank().end_wait()


def test_one_notice_in_a_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch(near(RankStatus(rank=1), tmp_path), int(watchdog.NOTICE_SECONDS) + 20)
    assert capsys.readouterr().err.count("waits for something") == 1


def far_apart() -> Any:
    """Rank 0 waits for rank 1, which computes, and hears where it is although it sees nothing."""
    rank = MPI.COMM_WORLD.rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "read_status", lambda path: (_ for _ in ()).throw(OSError))
        patch.setattr(watchdog, "TICK_SECONDS", 0.05)
        patch.setattr(watchdog, "ANSWER_SECONDS", 20)
        dog = watchdog.watchdog()
        ended: list[str] = []
        patch.setattr(watchdog, "abort", lambda: ended.append("aborted"))
        watchdog.before_abort.append(lambda error: ended.append(str(error)))
        this_rank().set_grid(Grid(2, 2, rank))
        with this_rank().step("training", 3, 7):
            request = MPI.COMM_WORLD.Ibarrier()
            if rank == 1:  # busy with a user's code
                deadline = time.monotonic() + 60
                while not this_rank().reported and time.monotonic() < deadline:
                    time.sleep(0.01)
                reported = bool(this_rank().reported)
                request.Wait()
                return reported
            dog.timeout = 1
            with BackOff(lambda: "rank 1") as back_off:
                while "aborted" not in ended:
                    request.Test()
                    back_off.pause()
        request.Wait()
        dog.timeout = 1e9
        return ended


def test_ranks_that_share_no_memory_answer_by_mpi() -> None:
    ended, reported = run_ranks(2, far_apart)
    assert reported
    words = ended[0]
    assert "rank 0 (stage 1 of replica 0)" in words
    assert "longer than timeout=1 s" in words
    assert "No answer" not in words
    assert "rank 1 (stage 0 of replica 0)" in words
    assert "in training batch 7 of epoch 3" in words
