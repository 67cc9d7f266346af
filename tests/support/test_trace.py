from __future__ import annotations

import time
from threading import Thread
from typing import Any

import pytest

from lightning_axosparse.support.trace import Clock, Span, now


def test_totals_grow_always_and_spans_are_kept_while_recording() -> None:
    clock = Clock()
    clock.add("forward", 1.0, 3.0)
    clock.start_recording()
    clock.add("forward", 4.0, 4.5, stage=1, microbatch=2)
    with pytest.raises(ValueError, match="inside"), clock.span("wait", stage=1):
        raise ValueError("inside")
    first, second = clock.stop_recording()
    clock.add("forward", 5.0, 6.0)
    assert first == Span("forward", 4.0, 4.5, 1, 2)
    assert (second.activity, second.stage, second.microbatch) == ("wait", 1, None)
    assert clock.totals["forward"] == 3.5
    assert clock.totals["wait"] == second.end - second.start
    assert clock.stop_recording() == []


class Slow(dict):
    """Lets other threads run between reading and writing an entry."""

    def __getitem__(self, key: Any) -> Any:
        value = self.get(key, 0)
        time.sleep(0.001)
        return value


def test_no_thread_loses_what_another_adds() -> None:
    clock = Clock()
    clock.totals = Slow()
    clock.start_recording()
    threads = [
        Thread(target=lambda: [clock.add("densify", 0, 1) for _ in range(5)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.totals["densify"] == len(clock.stop_recording()) == 40


def test_a_corrected_clock_of_the_host_changes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, right = Clock(), time.time()
    assert abs(now() - right) < 60
    with clock.span("wait"):
        monkeypatch.setattr(time, "time", lambda: right - 3600)
    assert 0 <= clock.totals["wait"] < 60
    assert abs(now() - right) < 60
