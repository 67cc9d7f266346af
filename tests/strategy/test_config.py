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
        ({"g_inter": 4, "regrid": "some"}, r"regrid='some' must be"),
        ({"g_inter": 4, "regrid": True}, r"regrid=True must be.*'auto'"),
        ({"g_inter": 4, "regrid": 2.0}, r"regrid=2.0 must be"),
        ({"g_inter": 4, "regrid": -1}, r"regrid=-1 must be"),
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
        ({"schedule": "later"}, "schedule='later' must be"),
        ({"schedule": "1f1b", "in_flight": 3}, "in_flight=3 belongs"),
        ({"in_flight": 3}, "in_flight=3 has no effect with loss='whole'"),
    ],
)
def test_schedules(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        AxoSparseStrategy(g_inter=2, **options)


@pytest.mark.parametrize("balance", ["time", "size", [], [1.0, 2.0]])
def test_a_balance_is_by_parameters_or_by_numbers_of_layers(balance: Any) -> None:
    said = (
        r"balance=.* must be 'parameters', or .* such as \[3, 5\]\. .* log the time of each stage"
    )
    with pytest.raises(MisconfigurationException, match=said):
        AxoSparseStrategy(g_inter=2, balance=balance)
