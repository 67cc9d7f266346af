"""``g_inter="auto"``: chosen before ranks start, the same on all, and trained like any other."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy import partitioner
from tests.parity.cases import CLASSES, FEATURES, Net, Record, difference, fit, loader, trainer
from tests.ranks import run_ranks


class Example(Net):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.randn(2, FEATURES)


class Outer(Net):
    """Two containers, of which one has to be named."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, CLASSES))


def chosen(
    monkeypatch: pytest.MonkeyPatch, free: float, module: Net, ranks: int = 4, **options: Any
) -> Any:
    """The strategy, when a trainer of some ranks has shown it a module."""
    monkeypatch.setattr(partitioner, "free_bytes", lambda device, ranks: int(free))
    strategy = AxoSparseStrategy("auto", **options)
    run = trainer(strategy, ranks)
    run.strategy._lightning_module = module
    strategy.validate_fit(run)
    return strategy


STATE = 16 * sum(parameter.numel() for parameter in Net().parameters())


@pytest.mark.parametrize("free", [STATE, STATE - 1])
def test_the_shortest_that_fits(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = chosen(monkeypatch, free, Net())
    stages = 1 if free == STATE else 2
    assert strategy.g_inter == strategy.grid.g_inter == stages
    assert strategy.grid.g_data == 4 // stages
    assert strategy.microbatches == (1 if stages == 1 else 8)


def test_the_activations_of_an_example_take_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, STATE, Net(), ranks=2).g_inter == 1
    assert chosen(monkeypatch, STATE, Example(), ranks=2).g_inter == 2


def test_an_example_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    compare = partitioner.compare_grids
    monkeypatch.setattr(
        partitioner, "compare_grids", lambda work, *args: seen.append(work) or compare(work, *args)
    )
    chosen(monkeypatch, 1e12, Example())
    costs = seen[0].layers
    assert costs.output_bytes[:2] == (2 * 24 * 4, 2 * 24 * 4)
    assert costs.activation_bytes[0] >= 2 * 24 * 4
    assert min(costs.forward) > 0


def test_what_leaves_no_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        ({"g_inter": 2.5}, "g_inter=2.5 must be a whole number, 1 or more, or 'auto'"),
        ({"g_inter": "many"}, "g_inter='many' must be"),
        ({"g_inter": "auto", "transport": "loopback"}, "all stages share one"),
        ({"g_inter": "auto", "balance": [2, 4]}, "say g_inter=2 instead of 'auto'"),
    ):
        with pytest.raises(MisconfigurationException, match=words):
            AxoSparseStrategy(**options)
    with pytest.raises(MisconfigurationException, match="no grid of 4 ranks that fits"):
        chosen(monkeypatch, 10, Net())
    with pytest.raises(MisconfigurationException, match=r"'model'.*'more'"):
        chosen(monkeypatch, 1e12, Outer())
    assert chosen(monkeypatch, 1e12, Outer(), pipeline="model").g_inter == 1


def test_one_rank_leaves_nothing_to_choose() -> None:
    run = trainer(AxoSparseStrategy("auto"))
    run.fit(Outer(), loader(1, batches=1))
    assert run.strategy.g_inter == 1


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_are_started_here_train_on_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    L.seed_everything(0, verbose=False)
    expected = fit(trainer("auto", max_epochs=1), Net())
    monkeypatch.setattr(partitioner, "free_bytes", lambda device, ranks: STATE - 1)
    L.seed_everything(0, verbose=False)
    run = trainer(AxoSparseStrategy("auto"), 2, max_epochs=1)
    assert difference(expected, fit(run, Net())) <= 5e-7
    assert run.strategy.g_inter == 2


def fit_where_only_the_first_rank_is_short(ranks: int) -> tuple[int, Record, int]:
    from mpi4py import MPI

    from lightning_axosparse import AxoSparseStrategy

    free = STATE - 1 if MPI.COMM_WORLD.rank == 0 else 10 * STATE
    partitioner.free_bytes = lambda device, sharing: free
    L.seed_everything(0, verbose=False)
    run = trainer(AxoSparseStrategy("auto"), ranks, max_epochs=1)
    return run.strategy.g_inter, fit(run, Net()), run.strategy.g_inter


def test_ranks_that_run_already_follow_the_first() -> None:
    L.seed_everything(0, verbose=False)
    expected = fit(trainer("auto", max_epochs=1), Net())
    for before, record, after in run_ranks(2, fit_where_only_the_first_rank_is_short, 2):
        assert (before, after) == (1, 2)
        assert difference(expected, record) <= 5e-7
