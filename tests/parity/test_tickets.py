"""The ticket of any search is the same on every grid as on one process, and so is what follows."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from tests.parity.cases import Net, Record, difference, fit, trainer
from tests.ranks import run_ranks

GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "2x1": (2, {"g_inter": 2}),
    "loopback": (1, {"g_inter": 3, "transport": "loopback"}),
    "3x1": (3, {"g_inter": 3}),
}

SEARCHES: dict[str, dict[str, Any]] = {
    "inside an epoch": {"every": 4, "window": 2, "threshold": 1.0, "draw_after": 7},
    "at the latest": {"every": 1, "threshold": 1e-6, "draw_by": 10},
    "at the end of an epoch": {"every": "1 epoch", "draw_by": "2 epochs"},
}


def train(search: str, ranks: int, grid: dict[str, Any]) -> tuple[Record, Any]:
    from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket

    L.seed_everything(0, verbose=False)
    draw = EarlyBirdTicket(0.6, **{"draw_by": None, **SEARCHES[search]})
    strategy = AxoSparseStrategy(microbatches=2, **grid)
    run = trainer(strategy, ranks, callbacks=[draw], precision="64-true")
    return fit(run, Net(outer=True, tied=True).double()), draw


def on_grid(grid: str) -> dict[str, tuple[Record, Any]]:
    return {search: train(search, *GRIDS[grid]) for search in SEARCHES}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Record, Any]]:
    return {search: train(search, 1, {}) for search in SEARCHES}


def test_the_searches_end_where_they_are_meant_to(alone: dict[str, Any]) -> None:
    drawn = {search: draw.ticket.step for search, (_, draw) in alone.items()}
    assert drawn == {"inside an epoch": 8, "at the latest": 10, "at the end of an epoch": 12}


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_draws_the_ticket_of_one_process(grid: str, alone: dict[str, Any]) -> None:
    ranks = GRIDS[grid][0]
    results = [on_grid(grid)] if ranks == 1 else run_ranks(ranks, on_grid, grid)
    for found in results:
        for search, (record, draw) in found.items():
            expected, searched = alone[search]
            assert draw.ticket == searched.ticket, search
            assert list(draw.distances) == list(searched.distances)
            for name, mask in searched.ticket.masks.items():
                assert torch.equal(draw.ticket.masks[name], mask), name
            assert difference(record, expected) <= 1e-12, search
