"""A module after a run under mpiexec: sharded, and whole where and when that is asked for."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket
from lightning_axosparse.pipeline.shard.sharded_module import (
    allocate,
    load_values,
    parameters_on_meta,
    validate_values,
)
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
        "refusals": [
            *map(refusal, (module.state_dict, module.model.state_dict, partial(module, x))),
            *map(refusal, (partial(copied, module), partial(pickle.dumps, module))),
        ],
    }


def refusal(call: Callable[[], Any]) -> str:
    try:
        return f"no error, but {len(call())} tensors"
    except RuntimeError as error:
        return str(error)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(module).state_dict()


def use(
    strategy: Callable[[], Any],
    other: Any,
    devices: int,
    folder: Path,
    pruned: bool,
) -> dict[str, Any]:
    """Fit, save, predict with the same strategy, test with another one, and fit again."""
    callbacks = [GradualPruning(ticket=TICKET)] if pruned else []
    module, found = network(), {}
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


def on_two(folder: Path) -> dict[str, Any]:
    strategy, found = partial(AxoSparseStrategy, 2, 4, balance=[4, 2]), {}
    for name in ("dense", "pruned"):
        other = AxoSparseStrategy(2, 2, balance=[1, 5])
        found[name] = use(strategy, other, 2, folder / name, pruned=name == "pruned")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """What two ranks did, and where they have saved it."""
    folder = tmp_path_factory.mktemp("two")
    return run_ranks(2, on_two, folder), folder


@pytest.fixture(scope="module", params=["dense", "pruned"])
def runs(request: Any, two: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By name, what one process and two ranks did, and the folders of their checkpoints."""
    name, (ranks, folder) = request.param, two
    alone = tmp_path_factory.mktemp("alone")
    single = AxoSparseStrategy if name == "pruned" else partial(str, "auto")
    return {
        "alone": use(single, "auto", 1, alone, pruned=name == "pruned"),
        "two": [rank[name] for rank in ranks],
        "folders": (alone, folder / name),
    }


@pytest.mark.slow
def test_each_rank_keeps_its_own_layers_alone(runs: Any) -> None:
    end, begin = (rank["after"] for rank in runs["two"])  # The first rank has the last stage.
    assert "model.0.weight" in begin["held"] - end["held"]
    assert "model.5.weight" in end["held"] - begin["held"]
    shared = {"scale", "temperature", "model.2.weight"}
    assert begin["held"] & end["held"] == shared
    assert all(rank["same"] for rank in runs["two"])
    for rank in (begin, end):
        assert all("summon_full_params" in each for each in rank["refusals"])


@pytest.mark.slow
def test_the_first_rank_alone_has_all_of_it_inside_the_context(runs: Any) -> None:
    first, second = runs["two"]
    assert first["inside"]["held"] == first["after"]["held"] | second["after"]["held"]
    assert all("no error" in each for each in first["inside"]["refusals"])
    assert second["inside"] == second["after"] == second["again"]
    assert first["again"] == first["after"]


@pytest.mark.slow
def test_later_runs_do_what_they_do_on_one_process(runs: Any) -> None:
    alone = runs["alone"]
    for rank in runs["two"]:
        assert difference(alone["first"], rank["first"]) < 1e-6
        assert difference(alone["second"], rank["second"]) < 1e-6
        torch.testing.assert_close(rank["predicted"], alone["predicted"])
        assert rank["tested"] == pytest.approx(alone["tested"], abs=1e-6)


@pytest.mark.slow
def test_a_checkpoint_is_saved_after_the_run(runs: Any) -> None:
    ours, theirs = (torch.load(f / "end.ckpt", weights_only=False) for f in runs["folders"])
    assert _tensors(ours).keys() == _tensors(theirs).keys()
    for key, value in _tensors(ours).items():
        torch.testing.assert_close(value, _tensors(theirs)[key])


def _tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    states = checkpoint["optimizer_states"][0]["state"]
    moments = {f"{i}.{k}": v for i, state in states.items() for k, v in state.items()}
    return {**checkpoint["state_dict"], **moments}


def on_fewer_stages(folder: Path) -> dict[str, Any]:
    strategy = partial(AxoSparseStrategy, 4, 4, regrid=2)
    return use(strategy, AxoSparseStrategy(4, 4), 4, folder, pruned=True)


@pytest.mark.slow
def test_it_stays_sharded_where_the_next_run_begins_on_more_stages(tmp_path: Path) -> None:
    alone = use(AxoSparseStrategy, "auto", 1, tmp_path, pruned=True)
    ranks = run_ranks(4, on_fewer_stages, tmp_path)
    whole = set(alone["first"].weights)
    for rank in ranks:
        assert rank["after"]["held"] < whole
        assert rank["after"]["held"] == rank["again"]["held"]
        for run in ("first", "second"):
            for name, weight in alone[run].weights.items():
                torch.testing.assert_close(rank[run].weights[name], weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(rank["predicted"], alone["predicted"])
        assert rank["tested"] == pytest.approx(alone["tested"], abs=1e-6)
    for run in ("first", "second"):  # After a regrid, each replica has the loss of its samples.
        losses = torch.tensor([rank[run].losses for rank in ranks])
        torch.testing.assert_close(
            losses.mean(0), torch.tensor(alone[run].losses), rtol=0, atol=1e-6
        )
        assert (losses[0] != losses[-1]).all()
        assert torch.equal(losses[0], losses[1])
    assert set().union(*(rank["after"]["held"] for rank in ranks)) == {
        name for name, _ in network().named_parameters()
    }


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def net() -> nn.Sequential:
    """A net whose first and last weight are one."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def no_tensor(tensor: torch.Tensor) -> bool:
    return False


def test_parameters_on_meta_are_filled_by_a_state_dict() -> None:
    with parameters_on_meta(no_tensor):
        module = net()
    parameters = list(module.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert module[2].weight is module[0].weight
    assert module[1].running_var.tolist() == [1, 1, 1]
    allocate(module[0].parameters())
    state = {name: torch.ones(value.shape) for name, value in module.state_dict().items()}
    load_values(module, state, strict=True)
    assert torch.equal(module[0].weight, torch.ones(3, 3))
    assert module[0].weight is parameters[0]
    assert module[2].bias.is_meta
    with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias"):
        load_values(module, {**state, "2.bias": torch.ones(4)}, strict=True)


def test_a_state_dict_gives_parameters_without_memory_theirs() -> None:
    torch.manual_seed(0)
    saved = net()
    state = saved.state_dict()
    state["1.weight"] = state["1.weight"].double()
    shared = {state[name].data_ptr() for name in ("0.weight", "0.bias", "1.weight")}
    with parameters_on_meta(lambda tensor: tensor.data_ptr() in shared):
        module = net()
        parameters = list(module.parameters())
        module.load_state_dict(state)
    for (name, one), two in zip(saved.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert (two.dtype, two.requires_grad) == (torch.float32, True), name
    assert [*map(id, module.parameters())] == [*map(id, parameters)]
    assert module[2].weight is module[0].weight
    same = {n for n, p in module.named_parameters() if p.data_ptr() == state[n].data_ptr()}
    assert same == {"0.weight", "0.bias"}, "of other dtypes and tensors there are copies"
    assert not any(part._load_state_dict_pre_hooks for part in module.modules())


def test_a_state_dict_of_other_shapes_or_names_is_refused() -> None:
    with parameters_on_meta(no_tensor):
        module = net()
        for other in ({"2.bias": torch.ones(4)}, {"3.bias": torch.ones(3)}):
            with pytest.raises(RuntimeError, match=r"size mismatch for 2\.bias|Unexpected key"):
                module.load_state_dict({**net().state_dict(), **other})


def load_in_part() -> None:
    state = net().state_dict()
    del state["2.bias"]
    with parameters_on_meta(no_tensor):
        module = net()
        module.load_state_dict(state, strict=False)
        module.to("cpu")


def test_a_module_that_is_moved_without_all_its_values_is_refused() -> None:
    words = r"no values for Linear\.bias of shape \(3,\) and 0 more.*empty_init"
    with pytest.raises(MisconfigurationException, match=words):
        load_in_part()


def fail_with_parameters_on_meta() -> None:
    with parameters_on_meta(no_tensor):
        net()
        raise NotImplementedError("abstract")


def test_other_errors_than_of_values_stay() -> None:
    with pytest.raises(NotImplementedError, match="abstract"):
        fail_with_parameters_on_meta()


def test_a_stage_without_values_is_refused_before_it_computes() -> None:
    parameters = {"a": torch.empty(1), "b": torch.empty(1, device="meta")}
    with pytest.raises(
        MisconfigurationException, match=r"Stage 1 has no values for 'b'.*ckpt_path"
    ):
        validate_values(parameters.items(), 1)
