"""A pure 16-bit run that was stopped goes on from the float32 values, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.sparse.module.optimizer_state import MASTER
from tests.parity.cases import Net, Plain, Record, loader, recorded, trainer
from tests.ranks import run_ranks

EPOCHS, STOP = 4, 3


ROWS: dict[Any, type[Net]] = {
    "bf16-true": Net,
    "16-true": Plain,  # AdamW's eps is nothing in float16
}


def train(row: Any, ranks: int, folder: Path, epochs: int, resume: Path | None = None) -> Record:
    L.seed_everything(0, verbose=False)
    # 16 bits round whole batches otherwise than micro-batches, so one rank computes these, too.
    transport = "mpi" if ranks == 2 else "loopback"
    run = trainer(
        AxoSparseStrategy(g_inter=2, microbatches=2, transport=transport),
        ranks,
        max_epochs=epochs,
        precision=row,
        enable_checkpointing=True,
        callbacks=[
            EarlyBirdTicket(0.6, every="1 epoch", draw_by="2 epochs"),
            ModelCheckpoint(folder, filename="stop"),
        ],
    )
    model = ROWS[row](outer=True, tied=True)
    run.fit(model, loader(1), ckpt_path=resume, weights_only=False)
    return recorded(run, model)


def stop(folder: Path) -> None:
    for row in ROWS:
        train(row, 1, folder / row, STOP)


def go_on(ranks: int, folder: Path) -> dict[str, tuple[Record, Record]]:
    """Uninterrupted, and from where one process stopped."""
    at = folder / f"ranks={ranks}"
    return {
        row: (
            train(row, ranks, at / "whole", EPOCHS),
            train(row, ranks, at / "rest", EPOCHS, folder / row / "stop.ckpt"),
        )
        for row in ROWS
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("masters")
    stop(path)
    return path


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    return {"1x1": [go_on(1, folder)], "2x1": run_ranks(2, go_on, 2, folder)}


def expect_same(whole: Record, rest: Record) -> None:
    assert rest.losses == whole.losses[-len(rest.losses) :]
    torch.testing.assert_close(rest.weights, whole.weights, rtol=0, atol=0)


@pytest.mark.parametrize("grid", ["1x1", "2x1"])
@pytest.mark.parametrize("row", ROWS)
def test_a_resumed_run_equals_one_that_never_stopped(row: str, grid: str, runs: Any) -> None:
    for results in runs[grid]:
        expect_same(*results[row])


def test_checkpoints_without_masters_still_load(runs: Any, folder: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(folder / "bf16-true" / "stop.ckpt", weights_only=False)
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state.pop(MASTER, None)
    torch.save(checkpoint, tmp_path / "old.ckpt")
    rest = train("bf16-true", 1, tmp_path, EPOCHS, tmp_path / "old.ckpt")
    whole, _ = runs["1x1"][0]["bf16-true"]
    assert rest.losses == pytest.approx(whole.losses[-len(rest.losses) :], rel=0.1)
    with pytest.raises(AssertionError):
        expect_same(whole, rest)
