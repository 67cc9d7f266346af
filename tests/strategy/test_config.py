from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"g_inter": 4, "regrid": 3}, r"regrid=3 .*g_inter=4.*\[1, 2\]"),
        ({"g_inter": 4, "regrid": 4}, r"regrid=4 .*\[1, 2\]"),
        ({"g_inter": 1, "regrid": 1}, r"regrid=1 .*Leave regrid out"),
        ({"g_inter": 2, "regrid": 1, "transport": "loopback"}, "one process"),
        ({"g_inter": 2, "regrid": "auto", "loss": "mean", "in_flight": 2}, "in_flight=None"),
        ({"g_inter": 2, "regrid": "auto", "schedule": "1f1b"}, "message-driven"),
    ],
)
def test_arguments_of_a_regrid(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b", "in_flight": 3}, "in_flight=3 belongs"),
        ({"in_flight": 3}, "in_flight=3 has no effect with loss='whole'"),
    ],
)
def test_schedules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(g_inter=2, **options)


def test_who_gives_no_balance_is_told_of_the_times_of_stages() -> None:
    said = r"balance=.* such as \[3, 5\]\. .* log the time of each stage"
    with pytest.raises(MisconfigurationException, match=said):
        AxoSparseStrategy(g_inter=2, balance="time")  # type: ignore[arg-type]
