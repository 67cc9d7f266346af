from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    ModelPruning,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.optim import LBFGS, AdamW

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.strategy import validation
from lightning_axosparse.strategy.validation import (
    validate_callbacks,
    validate_copied_whole,
    validate_local_rank,
    validate_optimizers,
    validate_world_size,
)
from tests.parity.cases import Net, loader
from tests.parity.cases import fit as fit_net
from tests.parity.cases import trainer as net_trainer
from tests.quiet import QUIET


class Fetches(Net):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        (x, y), _, _ = next(dataloader_iter)
        return torch.nn.functional.cross_entropy(self(x), y)


def test_a_step_that_fetches_its_batches_is_refused_in_a_pipeline() -> None:
    grid: dict[str, Any] = {"g_inter": 2, "transport": "loopback"}
    with pytest.raises(MisconfigurationException, match=r"training_step.*of Fetches takes batches"):
        fit_net(net_trainer(AxoSparseStrategy(**grid)), Fetches())
    fit_net(net_trainer(AxoSparseStrategy(microbatches=1), max_epochs=1), Fetches())
    net_trainer(AxoSparseStrategy(**grid)).validate(Fetches(), loader(1), verbose=False)
    module = Net()
    module.validation_step = None  # type: ignore[assignment]
    fit_net(net_trainer(AxoSparseStrategy(**grid), max_epochs=1), module)


def test_callbacks() -> None:
    validate_callbacks([EarlyStopping("loss"), EMAWeightAveraging()])
    with pytest.raises(MisconfigurationException, match=r"BatchSizeFinder.*micro-batch"):
        validate_callbacks([EarlyStopping("loss"), BatchSizeFinder()])


def test_callbacks_where_one_process_has_all_stages() -> None:
    strategy = AxoSparseStrategy(g_inter=2, transport="loopback")
    run = net_trainer(strategy, callbacks=[BatchSizeFinder(), ModelPruning("l1_unstructured")])
    strategy.connect(Net())
    strategy.validate_fit(run)


def test_averages_of_a_module_that_is_left_sharded() -> None:
    validate_copied_whole([EarlyStopping("loss")])
    with pytest.raises(MisconfigurationException, match="EMAWeightAveraging copies the module"):
        validate_copied_whole([EMAWeightAveraging()])


def test_norms_of_each_sample_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(validation, "rank_zero_info", said.append)
    for layer, number in ((nn.InstanceNorm1d(4), 0), (nn.LayerNorm(4), 0), (nn.BatchNorm1d(4), 1)):
        partition = Partition(["a", "b"], [layer, layer], [range(1), range(1, 2)], [1, 1])
        validation.advise_on_norms(partition, 4, trains=True)
        assert len(said) == number


def test_optimizers() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    whole, pipelined = (AxoSparseStrategy(number, 2).config for number in (1, 2))
    validate_optimizers(pipelined, [], g_data=2)
    validate_optimizers(pipelined, [AdamW(parameters)], g_data=2)
    with pytest.raises(MisconfigurationException, match=r"2 optimizers \(AdamW, AdamW\)"):
        validate_optimizers(pipelined, [AdamW(parameters), AdamW(parameters)], g_data=1)
    for config, g_data in ((pipelined, 1), (whole, 2)):
        with pytest.raises(MisconfigurationException, match="LBFGS"):
            validate_optimizers(config, [LBFGS(parameters)], g_data)
    validate_optimizers(whole, [LBFGS(parameters), AdamW(parameters)], g_data=1)


@pytest.mark.parametrize(("devices", "nodes", "job"), [(4, 1, 1), (4, 1, 4), (4, 2, 8), (1, 1, 1)])
def test_worlds_that_fit(devices: int, nodes: int, job: int) -> None:
    validate_world_size(devices, nodes, job)


@pytest.mark.parametrize(("devices", "nodes", "job"), [(4, 1, 8), (1, 1, 2), (8, 2, 8)])
def test_worlds_that_do_not(devices: int, nodes: int, job: int) -> None:
    with pytest.raises(MisconfigurationException) as refusal:
        validate_world_size(devices, nodes, job)
    for number in (devices, nodes, job, devices * nodes):
        assert str(number) in str(refusal.value)


def test_a_node_with_more_ranks_than_devices() -> None:
    validate_local_rank(local_rank=1, devices=2, num_nodes=2)
    with pytest.raises(MisconfigurationException, match=r"rank 2 of its node.*wants 2 on each of"):
        validate_local_rank(local_rank=2, devices=2, num_nodes=2)


def test_ranks_of_several_nodes_are_not_started_on_one() -> None:
    with pytest.raises(MisconfigurationException, match=r"wants ranks on 3 nodes.*mpiexec -n 6 "):
        Trainer(accelerator="cpu", devices=2, num_nodes=3, strategy="axosparse", logger=False)


class LaunchReached(Exception):
    """Nothing was refused before ranks would be started."""


class Launches(AxoSparseStrategy):
    @property
    def launcher(self) -> Any:
        raise LaunchReached


@pytest.mark.parametrize("run", ["fit", "validate", "test", "predict"])
def test_lightning_refuses_a_module_that_is_compiled_whole_before_ranks_start(run: str) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=Launches(), **QUIET)
    with pytest.raises(RuntimeError, match="Using a compiled model is incompatible"):
        getattr(trainer, run)(torch.compile(BoringModel()))
