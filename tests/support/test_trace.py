from __future__ import annotations

import pytest

from lightning_axosparse.support.trace import Clock, Span


def test_totals_grow_always_and_spans_are_kept_while_recording() -> None:
    clock = Clock()
    clock.add("forward", 1.0, 3.0)
    clock.record()
    clock.add("forward", 4.0, 4.5, stage=1, microbatch=2)
    with pytest.raises(ValueError, match="inside"), clock.span("wait", stage=1):
        raise ValueError("inside")
    first, second = clock.recorded()
    clock.add("forward", 5.0, 6.0)
    assert first == Span("forward", 4.0, 4.5, 1, 2)
    assert (second.activity, second.stage, second.microbatch) == ("wait", 1, None)
    assert clock.totals["forward"] == 3.5
    assert clock.totals["wait"] == second.end - second.start
    assert clock.recorded() == []
