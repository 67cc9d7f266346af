"""A module sharded over real ranks, moved to another grid, and gathered again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.pipeline.shard.partition import partition_layers
from lightning_axosparse.pipeline.shard.sharded_module import Transfer
from lightning_axosparse.strategy.regrid import move_tensors
from lightning_axosparse.strategy.stages.stage_module import StageModule
from tests.parity.cases import Net
from tests.ranks import run_ranks

CPU, CONFIG = torch.device("cpu"), AxoSparseStrategy(g_inter=2).config
SHARED = {"scale", "temperature", "model.2.weight"}
HELD = {
    2: [
        SHARED | {"model.4.bias", "model.5.weight", "model.5.bias"},
        SHARED | {"model.0.weight", "model.0.bias", "model.2.bias"},
    ],
    1: [set(dict(Net(outer=True, tied=True).named_parameters()))] * 2,
}
"""The parameters of each rank; the second and third linear layers share a weight."""


def net(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = Net(outer=True, tied=True)
    optimizer = torch.optim.AdamW(module.parameters())
    for number, parameter in enumerate(module.parameters()):
        optimizer.state[parameter] = {"step": torch.tensor(float(number))}
    return module, optimizer


def weights(module: Net) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone()
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }


def storage(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in parameters)


def shard_reshard_unshard() -> dict[str, Any]:
    """What a rank keeps on two stages, on one stage, and in the end."""
    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    rank = torch.distributed.get_rank()
    module, optimizer = net(seed=rank)
    parameters = dict(module.named_parameters())
    found: dict[str, Any] = {"before": weights(module)}
    old = Grid(2, 2, rank)
    partition = partition_layers(module, "model", [3, 3], 2)
    groups = ProcessGroups(old)
    stages = StageModule(CONFIG, module, partition, groups, range(old.stage, old.stage + 1), CPU)

    def note() -> dict[str, Any]:
        held = stages.sharding.local_parameters()
        return {
            "weights": {name: held[name].detach().clone() for name in held},
            "steps": {name: float(optimizer.state[held[name]]["step"]) for name in held},
            "states": len(optimizer.state),
            "groups": [
                list(map(id, g["params"])) == list(map(id, module.parameters()))
                for g in optimizer.param_groups
            ],
            "kept": storage(list(parameters.values())),
        }

    stages.shard([optimizer])
    found["sharded"] = note()
    for parameter in stages.sharding.local_parameters().values():
        parameter.data.add_(1)
    new = old.shortened(1)
    with stages.reshard(partition.with_stages(1), ProcessGroups(new)):
        transfer = Transfer(module, [optimizer], CPU)
        move_tensors(stages.sharding, partition.with_stages(1).parts, transfer, old, new)
    found["resharded"] = note()
    for parameter in stages.sharding.local_parameters().values():
        parameter.data.add_(1)
    stages.unshard()
    found["unsharded"] = weights(module)
    found["same objects"] = all(p is parameters[n] for n, p in module.named_parameters())
    found["own forward"] = not any("forward" in vars(layer) for layer in module.model)
    return found


@pytest.fixture(scope="module")
def on_two() -> list[dict[str, Any]]:
    return run_ranks(2, shard_reshard_unshard)


@pytest.mark.parametrize(("moment", "stages", "added"), [("sharded", 2, 0), ("resharded", 1, 1)])
def test_a_rank_keeps_the_parameters_and_the_optimizer_state_of_its_stage(
    on_two: list[dict[str, Any]], moment: str, stages: int, added: int
) -> None:
    module, optimizer = net(seed=0)
    steps = {n: float(optimizer.state[p]["step"]) for n, p in module.named_parameters()}
    for held, found in zip(HELD[stages], on_two, strict=True):
        kept = found[moment]
        assert kept["weights"].keys() == held
        assert kept["steps"] == {name: steps[name] for name in held}
        assert kept["states"] == len(held)
        assert kept["groups"] == [True]
        assert kept["kept"] == sum(value.nbytes for value in kept["weights"].values())
        for name, value in kept["weights"].items():
            source = 0 if name in HELD[2][0] else 1
            assert torch.equal(value, on_two[source]["before"][name] + added)


def test_a_gathered_module_is_whole_and_its_own_again(on_two: list[dict[str, Any]]) -> None:
    first, second = (found["unsharded"] for found in on_two)
    assert first.keys() == HELD[1][0]
    for found in on_two:
        assert found["same objects"]
        assert found["own forward"]
    for name, value in first.items():
        assert torch.equal(value, second[name])
        source = 0 if name in HELD[2][0] else 1
        assert torch.equal(value, on_two[source]["before"][name] + 1 + 1)
