"""Replicas evaluate with the buffers of the first one, which are those of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import (
    FEATURES,
    Net,
    Record,
    difference,
    fit,
    free_port,
    join_ddp,
    loader,
    trainer,
)
from tests.ranks import run_ranks


class Normed(Net):
    """Running statistics that a replica makes of its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 12)),
            nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 5)),
        )


def train(strategy: Any, ranks: int, path: Path) -> Record:
    L.seed_everything(0, verbose=False)
    run = trainer(strategy, ranks, precision="64-true")
    record = fit(run, Normed())
    run.save_checkpoint(path)
    return record


def on_grids(ranks: int, folder: Path, **options: Any) -> dict[str, Record]:
    found = {}
    for stages in (1, 2):
        for microbatches in (1, 2):
            grid = f"{stages} stages on {ranks} ranks, {microbatches}"
            strategy = AxoSparseStrategy(stages, microbatches, pipeline="model", **options)
            found[grid] = train(strategy, ranks, folder / grid)
    return found


def on_ranks(folder: Path, port: int) -> dict[str, Record]:
    found = on_grids(4, folder)
    join_ddp(4, port)
    return {**found, "ddp": train("ddp", 4, folder / "ddp")}


def test_the_logged_loss_is_that_of_the_saved_model(tmp_path: Path) -> None:
    found = run_ranks(4, on_ranks, tmp_path, free_port())
    for records in found:
        assert difference(records["ddp"], records["1 stages on 4 ranks, 1"]) < 1e-12
    found.append(on_grids(1, tmp_path, transport="loopback"))
    for rank, records in enumerate(found):
        for grid in records.keys() - {"ddp"}:
            run = trainer(precision="64-true")
            module = Normed()
            module.load_state_dict(torch.load(tmp_path / grid)["state_dict"])
            (saved,) = run.validate(module, loader(2, batches=3), verbose=False)
            logged = records[grid].validated[-1]["val_loss"]
            # Lightning adds in float32 what it logs.
            assert logged == pytest.approx(saved["val_loss"], abs=1e-7), (rank, grid)
