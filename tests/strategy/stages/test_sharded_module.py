"""A module after a run under mpiexec: sharded, and whole where and when that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, Ticket
from lightning_axosparse.sparse.module.parameters import layouts
from tests.parity.cases import Net, difference, fit, loader, recorded, trainer
from tests.ranks import run_ranks

TICKET = Ticket({"model.2.weight": torch.rand(24, 24, generator=torch.manual_seed(3)) < 0.3}, 0.7)


def network() -> Net:
    L.seed_everything(5, verbose=False)
    return Net(outer=True, tied=True)


def facts_of(module: Net) -> dict[str, Any]:
    """What this rank has of a module, and what ``state_dict`` and a call say to that."""
    x, _ = next(iter(loader(1)))
    return {
        "held": {name for name, p in module.named_parameters() if not p.is_meta},
        "sparse": set(layouts(module)),
        "refusals": [refusal(module.state_dict), refusal(partial(module, x))],
    }


def refusal(call: Callable[[], Any]) -> str:
    try:
        return f"no error, but {len(call())} tensors"
    except RuntimeError as error:
        return str(error)


def use(
    strategy: Callable[[], Any],
    other: Any,
    devices: int,
    folder: Path,
    pruned: bool,
    make: Callable[[], Net] = network,
) -> dict[str, Any]:
    """Fit, save, predict with the same strategy, test with another one, and fit again."""
    callbacks = [EarlyBirdTicket(ticket=TICKET)] if pruned else []
    module, found = make(), {}
    before = dict(module.named_parameters())
    run = trainer(strategy(), devices, callbacks=callbacks)
    found["first"] = fit(run, module)
    if isinstance(run.strategy, AxoSparseStrategy):
        found["after"] = facts_of(module)
        with run.strategy.summon_full_params():
            found["inside"] = facts_of(module)
        run.strategy.teardown()  # so Lightning calls it for a run that fails before it begins
        found["again"] = facts_of(module)
    found["same"] = all(before[name] is p for name, p in module.named_parameters())
    run.save_checkpoint(folder / "end.ckpt")
    found["predicted"] = torch.cat(run.predict(module, loader(3)))
    tested = trainer(other, devices)
    found["tested"] = tested.test(module, loader(4), verbose=False)[0]
    again = trainer(strategy(), devices, callbacks=callbacks, max_epochs=1)
    again.fit(module, loader(6), loader(2, batches=3))
    found["second"] = recorded(again, module)
    return found


def on_two(folder: Path, pruned: bool) -> dict[str, Any]:
    other = AxoSparseStrategy(2, 2, balance=[1, 5])
    return use(partial(AxoSparseStrategy, 2, 4, balance=[4, 2]), other, 2, folder, pruned)


@pytest.fixture(scope="module", params=["dense", "pruned"])
def runs(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name, what one process and two ranks did, and the folders of their checkpoints."""
    pruned = request.param == "pruned"
    alone, two = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("two")
    single = AxoSparseStrategy if pruned else partial(str, "auto")
    return {
        "pruned": pruned,
        "alone": use(single, "auto", 1, alone, pruned),
        "two": run_ranks(2, on_two, two, pruned),
        "folders": (alone, two),
    }


def test_each_rank_keeps_its_own_layers_alone(runs: Any) -> None:
    first, second = (rank["after"] for rank in runs["two"])
    assert "model.0.weight" in first["held"] - second["held"]
    assert "model.5.weight" in second["held"] - first["held"]
    shared = {"scale", "temperature", "model.2.weight"}
    assert first["held"] & second["held"] == shared
    assert all(rank["same"] for rank in runs["two"])
    for rank in (first, second):
        assert all("summon_full_params" in each for each in rank["refusals"])


def test_the_first_rank_alone_has_all_of_it_inside_the_context(runs: Any) -> None:
    first, second = runs["two"]
    assert first["inside"]["held"] == first["after"]["held"] | second["after"]["held"]
    assert all("no error" in each for each in first["inside"]["refusals"])
    assert second["inside"] == second["after"] == second["again"]
    assert first["again"] == first["after"]


def test_later_runs_do_what_they_do_on_one_process(runs: Any) -> None:
    alone = runs["alone"]
    for rank in runs["two"]:
        assert difference(alone["first"], rank["first"]) < 1e-6
        assert difference(alone["second"], rank["second"]) < 1e-6
        torch.testing.assert_close(rank["predicted"], alone["predicted"])
        assert rank["tested"] == pytest.approx(alone["tested"], abs=1e-6)


def test_a_checkpoint_is_saved_after_the_run(runs: Any) -> None:
    ours, theirs = (torch.load(f / "end.ckpt", weights_only=False) for f in runs["folders"])
    assert _tensors(ours).keys() == _tensors(theirs).keys()
    for key, value in _tensors(ours).items():
        torch.testing.assert_close(value, _tensors(theirs)[key])


def _tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    states = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{i}.{k}": v for i, state in states.items() for k, v in state.items()}
    return {**checkpoint["state_dict"], **moments}


def with_example() -> Net:
    """The network with an example like a micro-batch."""
    module = network()
    module.example_input_array = next(iter(loader(1)))[0][:4]
    return module


def on_measured_stages(folder: Path) -> dict[str, Any]:
    strategy = partial(AxoSparseStrategy, 2, 4, balance="time")
    return use(strategy, AxoSparseStrategy(2, 2, balance=[1, 5]), 2, folder, False, with_example)


def on_fewer_stages(folder: Path) -> dict[str, Any]:
    strategy = partial(AxoSparseStrategy, 4, 4, regrid=2)
    return use(strategy, AxoSparseStrategy(4, 4), 4, folder, pruned=True)


@pytest.mark.parametrize("pruned", [False, True], ids=["balance=time", "regrid"])
def test_it_stays_sharded_where_the_next_run_measures_it_or_begins_on_more_stages(
    pruned: bool, tmp_path: Path
) -> None:
    single = AxoSparseStrategy if pruned else partial(str, "auto")
    alone = use(single, "auto", 1, tmp_path, pruned)
    job = (4, on_fewer_stages) if pruned else (2, on_measured_stages)
    ranks = run_ranks(*job, tmp_path)
    whole = set(alone["first"].weights)
    for rank in ranks:
        assert rank["after"]["held"] < whole
        assert rank["after"]["held"] == rank["again"]["held"]
        for run in ("first", "second"):
            assert difference(alone[run], rank[run]) < 1e-6
        torch.testing.assert_close(rank["predicted"], alone["predicted"])
        assert rank["tested"] == pytest.approx(alone["tested"], abs=1e-6)
    assert set().union(*(rank["after"]["held"] for rank in ranks)) == {
        name for name, _ in network().named_parameters()
    }
