from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.optim import LBFGS, SGD, AdamW

from lightning_axosparse.adapters.requirements import (
    refuse_callbacks,
    refuse_module,
    refuse_optimizers,
    refuse_world,
)
from tests.adapters.harness import CutStrategy, alone


def test_manual_optimization() -> None:
    module = BoringModel()
    refuse_module(module)
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="BoringModel sets `automatic_optimization"):
        refuse_module(module)


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (ModelPruning("l1_unstructured"), "EarlyBirdTicket"),
        (StochasticWeightAveraging(1e-3), "g_inter=1"),
        (EMAWeightAveraging(), "g_inter=1"),
    ],
)
def test_callbacks(callback: Callback, instead: str) -> None:
    refuse_callbacks([EarlyStopping("loss")])
    with pytest.raises(MisconfigurationException, match=rf"{type(callback).__name__}.*{instead}"):
        refuse_callbacks([EarlyStopping("loss"), callback])


def test_optimizers() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    refuse_optimizers([])
    refuse_optimizers([AdamW(parameters)])
    with pytest.raises(MisconfigurationException, match=r"2 optimizers \(AdamW, AdamW\)"):
        refuse_optimizers([AdamW(parameters), AdamW(parameters)])
    with pytest.raises(MisconfigurationException, match="LBFGS"):
        refuse_optimizers([LBFGS(parameters)])


@pytest.mark.parametrize(("devices", "nodes", "job"), [(4, 1, 1), (4, 1, 4), (4, 2, 8), (1, 1, 1)])
def test_worlds_that_fit(devices: int, nodes: int, job: int) -> None:
    refuse_world(devices, nodes, job)


@pytest.mark.parametrize(("devices", "nodes", "job"), [(4, 1, 8), (1, 1, 2), (8, 2, 8)])
def test_worlds_that_do_not(devices: int, nodes: int, job: int) -> None:
    with pytest.raises(MisconfigurationException) as refusal:
        refuse_world(devices, nodes, job)
    for number in (devices, nodes, job, devices * nodes):
        assert str(number) in str(refusal.value)


class LaunchReached(Exception):
    """Nothing was refused before ranks would be started."""


class Launches(CutStrategy):
    @property
    def launcher(self) -> Any:
        raise LaunchReached


class TwoOptimizers(BoringModel):
    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), lr=0.1), SGD(self.parameters(), lr=0.1)]


class TestAssumptionsAboutLightning:
    """What the strategy need not refuse, because Lightning does."""

    @pytest.mark.parametrize(
        ("module", "error"),
        [
            (pytorch_lightning.LightningModule(), TypeError),
            (torch.compile(BoringModel()), RuntimeError),
            (BoringModel(), LaunchReached),
        ],
    )
    def test_modules_are_refused_before_the_launch(self, module: Any, error: type) -> None:
        with pytest.raises(error):
            trainer(Launches).fit(module)

    def test_a_trainer_of_the_other_package(self) -> None:
        with pytest.raises(ValueError, match="instance of `pytorch_lightning"):
            pytorch_lightning.Trainer(strategy=CutStrategy(1, alone()))

    def test_several_optimizers(self) -> None:
        with pytest.raises(RuntimeError, match="multiple optimizers"):
            trainer(CutStrategy).fit(TwoOptimizers())


def trainer(strategy: type[CutStrategy]) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy=strategy(1, alone()),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
