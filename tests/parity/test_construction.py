"""Layers made in ``configure_model`` are made by the ranks that keep them, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.parity.cases import Net, difference, fit, trainer
from tests.ranks import run_ranks


class Late(Net):
    """The same net, but its layers and what stands around them are made in ``configure_model``."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        net = Net(outer=True, tied=True)
        self.scale, self.temperature = net.scale, net.temperature
        for name, child in net.named_children():
            setattr(self, name, child)
        with torch.no_grad():
            for parameter in self.model.parameters():
                nn.init.trunc_normal_(parameter, std=0.2)
                if parameter.abs().max().item() > 0.3:
                    parameter[0] = 0.1

    def on_fit_start(self) -> None:
        self.started = {
            name: parameter.detach().clone()
            for name, parameter in self.named_parameters()
            if not parameter.is_meta
        }


def train(strategy: Any, devices: int, folder: Path | None, **options: Any) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    saves = [] if folder is None else [ModelCheckpoint(folder, filename="end")]
    run = trainer(strategy, devices, callbacks=saves, enable_checkpointing=folder is not None)
    module = Late()
    record = fit(run, module, **options)
    return {"record": record, "started": module.started, "drawn": torch.rand(1)}


def on_a_grid(g_inter: int, ranks: int, folder: Path) -> dict[str, Any]:
    from lightning_axosparse import AxoSparseStrategy

    return train(AxoSparseStrategy(g_inter=g_inter, microbatches=2), ranks, folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("auto", 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(3, on_a_grid, 3, 3, tmp_path_factory.mktemp("three"))


def test_each_rank_makes_the_weights_of_its_stage_as_one_process_does(
    alone: dict[str, Any], on_three: list[dict[str, Any]]
) -> None:
    whole = alone["started"]
    for rank in on_three:
        outer = {name for name in whole if not name.startswith("model.")}
        assert outer < rank["started"].keys() < whole.keys()
        for name, value in rank["started"].items():
            assert torch.equal(value, whole[name])
    assert set().union(*(rank["started"] for rank in on_three)) == whole.keys()


def test_a_module_made_in_parts_trains_as_on_one_process(
    alone: dict[str, Any], on_three: list[dict[str, Any]]
) -> None:
    for rank in on_three:
        assert difference(rank["record"], alone["record"]) <= 1e-6
