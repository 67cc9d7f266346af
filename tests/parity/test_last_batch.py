"""A checkpoint of an epoch's last batch, before the draw at its end, resumes to the same draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.parity.cases import BATCHES, EPOCHS, Net, Record, fit, trainer
from tests.ranks import run_ranks

GRIDS: dict[str, dict[str, Any]] = {
    "one": {},
    "loopback": {"g_inter": 2, "transport": "loopback"},
    "ranks": {"g_inter": 2},
    "regrid": {"g_inter": 2, "regrid": 1},
}
LAST_BATCH = f"step={2 * BATCHES}.ckpt"
"""Written when the draw, at the end of the second epoch, is next."""


def train(grid: str, folder: Path, resume: Path | None = None) -> tuple[Record, Any]:
    from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket

    L.seed_everything(0, verbose=False)
    draw = EarlyBirdTicket(0.6, every="1 epoch", draw_by="2 epochs")
    saving = ModelCheckpoint(
        folder / grid, "{step}", save_top_k=-1, every_n_train_steps=BATCHES, monitor=None
    )
    run = trainer(
        AxoSparseStrategy(microbatches=2, **GRIDS[grid]),
        2 if grid in ("ranks", "regrid") else 1,
        callbacks=[draw, *([] if resume else [saving])],
        enable_checkpointing=resume is None,
        precision="64-true",
    )
    record = fit(run, Net(outer=True, tied=True).double(), ckpt_path=resume, weights_only=False)
    return record, draw


def resumed(grid: str, folder: Path) -> dict[str, Any]:
    origins = [origin for origin in GRIDS if (folder / origin).exists()]
    return {origin: train(grid, folder, folder / origin / LAST_BATCH) for origin in origins}


def on_ranks(folder: Path) -> dict[str, Any]:
    runs = {"through": train("ranks", folder), **resumed("ranks", folder)}
    return {**runs, "one, with a regrid": train("regrid", folder, folder / "one" / LAST_BATCH)}


def test_the_draw_comes_where_it_would_have_come(tmp_path: Path) -> None:
    record, expected = train("one", tmp_path)
    assert expected.ticket.step == 2 * BATCHES
    results = {"loopback": {"through": train("loopback", tmp_path)}}
    for rank, runs in enumerate(run_ranks(2, on_ranks, tmp_path)):
        results[f"rank {rank}"] = runs
    for grid in ("one", "loopback"):
        results.setdefault(grid, {}).update(resumed(grid, tmp_path))
    assert [len(runs) for runs in results.values()] == [4, 5, 5, 3]
    for grid, runs in results.items():
        for origin, (found, draw) in runs.items():
            where = f"{origin} -> {grid}"
            assert draw.ticket == expected.ticket, where
            assert draw.distances == expected.distances, where
            losses = BATCHES * EPOCHS if origin == "through" else BATCHES * (EPOCHS - 2)
            assert len(found.losses) == losses
            assert found.losses == pytest.approx(record.losses[-losses:], abs=1e-12), where
            for name, weight in record.weights.items():
                assert torch.allclose(found.weights[name], weight, rtol=0, atol=1e-12), where
