"""Runs a test's table of rows in pipelines, each row with a strategy of its own arguments.

All rows of a number of ranks are one job. ``train`` takes a row, the strategy and the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Record
from tests.ranks import run_ranks

Train = Callable[[str, Any, int], Any]
Rows = Mapping[str, Mapping[str, Any]]
"""Arguments of the strategy by row."""


def train_rows(train: Train, rows: Rows, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """What ``train`` returns of each row."""
    return {
        row: train(row, AxoSparseStrategy(**{"g_inter": ranks, **own, **more}), ranks)
        for row, own in rows.items()
    }


def rows_on_ranks(ranks: int, train: Train, rows: Rows) -> list[dict[str, Any]]:
    """The same on each rank."""
    return run_ranks(ranks, train_rows, train, rows, ranks)


def rows_in_process(stages: int, train: Train, rows: Rows) -> dict[str, Any]:
    """The same with all stages in one process."""
    return train_rows(train, rows, g_inter=stages, transport="loopback")


def rows_with_ticket(
    on_ranks: bool, train: Callable[..., Record], rows: Rows
) -> tuple[dict[str, Record], list[dict[str, Record]]]:
    """What one process and what pipelines do: two ranks with a ticket, or three stages without.

    Args:
        train: as above, and ``ticket``, whether one is drawn.
    """
    if not on_ranks:
        return {row: train(row, "auto") for row in rows}, [rows_in_process(3, train, rows)]
    draw = partial(train, ticket=True)
    return train_rows(draw, {row: {} for row in rows}), rows_on_ranks(2, draw, rows)
