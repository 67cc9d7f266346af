"""Whereabouts: what one process tells and another reads."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from lightning_axosparse import whereabouts
from lightning_axosparse.grid import Grid
from lightning_axosparse.whereabouts import Whereabouts, blocked, here, publish, read


def test_in_words() -> None:
    place = Whereabouts(host=b"node7", batch=-1)
    place.place_in(Grid(4, 2, 3))
    assert str(place) == "rank 3 (stage 1 of replica 1) on host node7: before its first batch"
    with place.step("training", 2, 17):
        assert place.where == "in training batch 17 of epoch 2, before its first micro-batch"
        place.begin_pass("backward", 5)
        place.begin_wait("the gradient of micro-batch 5 from rank 4")
        assert place.doing == (
            "in training batch 17 of epoch 2, micro-batch 5, backward pass; "
            "waits for the gradient of micro-batch 5 from rank 4"
        )
        place.end_wait()
    assert place.doing == "after training batch 17 of epoch 2"
    place.stops = True
    assert place.end_loop("training", 2) == 18
    assert place.doing == (
        "training of epoch 2 over after 18 batches, with trainer.should_stop set"
    )
    assert place.end_loop("validation", 2) == 0
    place.begin_run()
    assert place.doing == "before its first batch"


def test_long_words_are_cut() -> None:
    place = Whereabouts()
    place.begin_wait("ä" * 500)
    assert place.doing.count("ä") == 99


def go_astray(path: Path | None, line: int) -> None:
    whereabouts._here, whereabouts._path = Whereabouts(), ""
    here().batch = 5  # told before anybody could read it
    os.write(line, publish(3, path).encode())
    with here().step("training", 1, 6):
        os.write(line, b"!")
        signal.pause()


def test_another_process_reads_it_and_so_does_who_comes_after_its_death(tmp_path: Path) -> None:
    for path in (tmp_path / "whereabouts", None):
        ours, theirs = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=go_astray, args=[path, theirs])
        process.start()
        told = b""
        while not told.endswith(b"!"):
            told += os.read(ours, 1000)
        seen = read(told[:-1].decode())
        assert (seen.rank, seen.batch, seen.pid) == (3, 6, process.pid)
        process.kill()
        process.join()
        assert not seen.left
        assert seen.where == "in training batch 6 of epoch 1, before its first micro-batch"
        if path is not None:
            assert read(str(path)).where == seen.where
        os.close(ours), os.close(theirs)


def test_calls_that_return_when_others_take_part_are_waits() -> None:
    with blocked("all ranks to connect"):
        assert here().waits
        assert here().bulk
        assert here().doing.endswith("waits for all ranks to connect")
    assert not here().waits
