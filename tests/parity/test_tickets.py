"""The ticket of any search is the same on every grid as on one process, and so is what follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from tests.parity.cases import Net, Plain, Record, difference, fit, trainer
from tests.ranks import run_ranks

GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "loopback": (1, {"g_inter": 3, "transport": "loopback"}),
    "3x1": (3, {"g_inter": 3}),
}


def momentum(weight: Tensor, state: Mapping[str, Any]) -> Tensor:
    """A score of both signs."""
    return -weight * state["exp_avg"]


SEARCHES: dict[str, dict[str, Any]] = {
    "inside an epoch": {"every": 4, "window": 2, "threshold": 1.0},
    "magnitude, at the end of an epoch": {
        "score": "magnitude",
        "floor": 0.0,
        "every": "1 epoch",
        "draw_by": "2 epochs",
    },
    "a function, high floors": {"score": momentum, "floor": 0.5, "draw_by": 8},
    "the highest floor": {"floor": 1.0, "draw_by": 8},
    "biases": {
        "which": {"bias": True, "model.0.*": False},
        "draw_by": 8,
    },
}


def train(search: str, ranks: int, grid: dict[str, Any]) -> tuple[Record, Any]:
    L.seed_everything(0, verbose=False)
    draw = EarlyBirdTicket(0.6, **{"draw_by": None, "threshold": 1e-6, **SEARCHES[search]})
    strategy = AxoSparseStrategy(microbatches=2, **grid)
    run = trainer(strategy, ranks, callbacks=[draw], precision="64-true")
    record = fit(run, Net(outer=True, tied=True).double())
    return record, SimpleNamespace(ticket=draw.ticket, distances=draw.distances)


def on_grid(grid: str) -> dict[str, tuple[Record, Any]]:
    return {search: train(search, *GRIDS[grid]) for search in SEARCHES}


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Record, Any]]:
    return {search: train(search, 1, {}) for search in SEARCHES}


def test_the_searches_end_where_they_are_meant_to(alone: dict[str, Any]) -> None:
    drawn = {search: draw.ticket.step for search, (_, draw) in alone.items()}
    assert drawn == {s: 12 if "end of an epoch" in s else 8 for s in SEARCHES}
    scores = [draw.ticket.score for _, draw in alone.values()]
    assert scores == ["saliency", "magnitude", "momentum", *["saliency"] * 2]
    masks = [repr(draw.ticket.state_dict()["masks"]) for _, draw in alone.values()]
    assert len(set(masks)) == len(masks)


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


BALANCED: dict[str, dict[str, Any]] = {
    "alike": {"floor": 1.0},
    "as scored": {"floor": 0.0},
}


def on_stages(strategy: dict[str, Any], ranks: int) -> dict[str, Any]:
    drawn = {}
    for name, search in BALANCED.items():
        L.seed_everything(0, verbose=False)
        draw = EarlyBirdTicket(0.6, **search, draw_by=4)
        run = trainer(AxoSparseStrategy(**strategy), ranks, callbacks=[draw], precision="64-true")
        fit(run, Net().double())
        drawn[name] = draw.ticket
    return drawn


def test_stages_keep_as_evenly_as_asked_for() -> None:
    stages = {"g_inter": 2, "balance": [2, 4]}
    words = r"keeps \d+ entries in stage 1, but \d+ in stage 0.*balance=.*floor"
    with pytest.warns(UserWarning, match=words) as warned:
        expected = on_stages({**stages, "transport": "loopback"}, 1)
    assert sum("balance=" in str(warning.message) for warning in warned) == 2
    for drawn in run_ranks(2, on_stages, stages, 2):
        assert drawn == expected
    names = ["model.0.weight", "model.2.weight", "model.4.weight", "model.5.weight"]
    entries = {name: mask.numel() for name, mask in expected["alike"].masks.items()}
    whole = sum(entries.values()) - round(0.6 * sum(entries.values()))
    kept = {
        search: {name: int(mask.sum()) for name, mask in ticket.masks.items()}
        for search, ticket in expected.items()
    }
    assert all(list(found) == names for found in kept.values())
    own = entries[names[0]]
    assert kept["alike"][names[0]] == own - round(0.6 * own)
    assert abs(sum(kept["alike"].values()) - whole) <= 1
    assert sum(kept["as scored"].values()) == whole


REFUSED: dict[str, dict[str, Any]] = {
    "'heads' matches no parameter": {"which": {"heads": False}},
    "SGD does not estimate": {"score": "saliency"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_searched_is_refused_before_any_rank_starts(words: str) -> None:
    """An error of ranks would have a note."""
    draw = EarlyBirdTicket(0.6, **REFUSED[words])
    run = trainer(AxoSparseStrategy(g_inter=2), 2, callbacks=[draw])
    with pytest.raises(MisconfigurationException, match=words) as error:
        fit(run, Plain())
    assert not hasattr(error.value, "__notes__")
