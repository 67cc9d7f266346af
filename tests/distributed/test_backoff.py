from __future__ import annotations

import time

from lightning_axosparse.distributed.backoff import BackOff
from lightning_axosparse.distributed.rank_status import this_rank


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
        assert this_rank().doing.endswith("waits for an answer from rank 7")
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
