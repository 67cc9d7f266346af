"""Layers made in ``configure_model`` are made by the ranks that keep them, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_axosparse import AxoSparseStrategy, GradualPruning, Ticket
from tests.parity.cases import EPOCHS, Net, difference, fit, trainer
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


def train(
    strategy: Any,
    devices: int,
    folder: Path | None,
    *callbacks: Callback,
    epochs: int = EPOCHS,
    **options: Any,
) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    saves = [] if folder is None else [ModelCheckpoint(folder, filename="end")]
    run = trainer(
        strategy,
        devices,
        callbacks=[*callbacks, *saves],
        max_epochs=epochs,
        enable_checkpointing=folder is not None,
    )
    module = Late()
    record = fit(run, module, **options)
    return {"record": record, "started": module.started, "drawn": torch.rand(1)}


class Sizes(Callback):
    """Notes how many values are stored of each parameter before any callback prunes."""

    def on_fit_start(self, run: Any, module: Any) -> None:
        self.stored = {n: p.numel() for n, p in module.named_parameters() if not p.is_meta}


def adopted(g_inter: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Train with a ticket from the start, and go on from the checkpoint of the first epoch."""
    masks = {
        f"model.{layer}.weight": torch.arange(size).view(24, -1) % 3 == 0
        for layer, size in ((0, 288), (2, 576))
    }
    results = []
    for resume in (None, folder / "end.ckpt"):
        sizes = Sizes()
        strategy = AxoSparseStrategy(g_inter=g_inter, microbatches=2)
        prune = GradualPruning(ticket=Ticket(masks, pruning_ratio=0.6))
        end = 1 if resume is None else 2
        result = train(
            strategy,
            ranks,
            None if resume else folder,
            sizes,
            prune,
            epochs=end,
            ckpt_path=resume,
            weights_only=False,
        )
        results.append({"record": result["record"], "stored": sizes.stored})
    return {"fresh": results[0], "resumed": results[1]}


def on_three_ranks(folder: Path) -> dict[str, Any]:
    found = train(AxoSparseStrategy(g_inter=3, microbatches=2), 3, folder / "dense")
    return {**found, **adopted(3, 3, folder / "pruned")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train("auto", 1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def on_three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(3, on_three_ranks, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def pruned_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return adopted(1, 1, tmp_path_factory.mktemp("pruned"))


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


@pytest.mark.parametrize("run", ["fresh", "resumed"])
def test_a_ticket_from_the_start_is_followed_while_layers_are_made(
    run: str, pruned_alone: dict[str, Any], on_three: list[dict[str, Any]]
) -> None:
    alone, stored = pruned_alone[run], {"model.0.weight": 96, "model.2.weight": 192}
    ranks = [rank[run] for rank in on_three]
    for rank in ranks:
        held = {n: size for n, size in rank["stored"].items() if n in stored}
        assert held == {name: stored[name] for name in held}, "nothing was left to prune"
        assert difference(rank["record"], alone["record"]) <= 1e-6
    assert set().union(*(rank["stored"] for rank in ranks)) >= stored.keys()
    assert alone["stored"]["model.2.weight"] == 576, "one process prunes when fit starts"
