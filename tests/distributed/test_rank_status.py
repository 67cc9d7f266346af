"""What one process records in its status and another reads."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

from lightning_axosparse.distributed import rank_status
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.rank_status import (
    BackOff,
    RankStatus,
    blocked,
    read_status,
    this_rank,
)


def test_in_words() -> None:
    assert RankStatus(rank=5, stage=-1).name == "rank 5"
    place = RankStatus(host=b"node7", batch=-1)
    place.begin_run()
    place.set_grid(Grid(4, 2, 3))
    assert str(place) == "rank 3 (stage 0 of replica 1) on host node7: before its first batch"
    with place.step("training", 2, 17):
        assert place.activity == "in training batch 17 of epoch 2, before its first micro-batch"
        place.begin_pass("backward", 5)
        place.begin_wait("the gradient of micro-batch 5 from rank 4")
        assert place.activity == (
            "in training batch 17 of epoch 2, micro-batch 5, backward pass; "
            "waits for the gradient of micro-batch 5 from rank 4"
        )
        place.end_wait()
    assert place.activity == "after training batch 17 of epoch 2"
    assert place.end_loop("training", 2) == 18
    place.between_loops(stops=True)
    assert place.activity == (
        "training of epoch 2 over after 18 batches, with trainer.should_stop set"
    )
    assert place.end_loop("validation", 2) == 0
    place.between_loops(stops=False)
    assert place.activity == "validation of epoch 2 over after 0 batches"
    place.begin_run()
    assert place.activity == "before its first batch"


def test_long_words_are_cut() -> None:
    place = RankStatus()
    place.begin_wait("ä" * 500)
    assert place.activity.count("ä") == 99


def publish_and_wait(path: Path | None, line: int) -> None:
    importlib.reload(rank_status)  # A new process has published nothing.
    this_rank = rank_status.this_rank
    this_rank().batch = 5  # before it is published
    os.write(line, rank_status.publish(3, path).encode())
    with this_rank().step("training", 1, 6):
        os.write(line, b"!")
        signal.pause()


def test_another_process_reads_it_also_after_the_first_has_died(tmp_path: Path) -> None:
    for path in (tmp_path / "status", None):
        ours, theirs = os.pipe()
        process = multiprocessing.get_context("fork").Process(
            target=publish_and_wait, args=[path, theirs]
        )
        process.start()
        written = b""
        while not written.endswith(b"!"):
            written += os.read(ours, 1000)
        seen = read_status(written[:-1].decode())
        assert (seen.rank, seen.batch, seen.pid) == (3, 6, process.pid)
        process.kill()
        process.join()
        assert not seen.finished
        assert seen.activity == "in training batch 6 of epoch 1, before its first micro-batch"
        if path is not None:
            assert read_status(str(path)).activity == seen.activity
        os.close(ours), os.close(theirs)


def test_calls_that_return_when_others_take_part_are_waits() -> None:
    with blocked("all ranks to connect"):
        assert this_rank().waits
        assert this_rank().bulk
        assert this_rank().activity.endswith("waits for all ranks to connect")
    assert not this_rank().waits


def pause(back_off: BackOff, times: int) -> None:
    for _ in range(times):
        back_off.pause()


def test_a_wait_is_recorded_when_polls_have_not_ended_it() -> None:
    with BackOff(lambda: "an answer from rank 7", bulk=True) as back_off:
        pause(back_off, 20)
        assert not this_rank().waits
        pause(back_off, 1)
        assert this_rank().waits
        assert this_rank().bulk
        assert this_rank().activity.endswith("waits for an answer from rank 7")
        before = this_rank().progress
        pause(back_off, 3)
        assert this_rank().progress == before
        back_off.reset()
        assert this_rank().progress > before
    assert not this_rank().waits


def test_sleeps_last_a_millisecond_at_most() -> None:
    slept: list[float] = []
    with BackOff(lambda: "something") as back_off:
        monotonic = time.monotonic()
        pause(back_off, 21)
        while time.monotonic() < monotonic + 0.05:
            back_off.pause()
        sleep, time.sleep = time.sleep, slept.append
        try:
            pause(back_off, 2)
        finally:
            time.sleep = sleep
    assert slept == [1e-3, 1e-3]
