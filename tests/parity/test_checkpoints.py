"""A checkpoint written on one grid continues the same run on any other, before and after a draw.

Two grids write one file each, and two a folder to which all stages write.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.checkpoint.consolidate import consolidate
from tests.parity.cases import Net, Record, loader, recorded, share, trainer
from tests.ranks import run_ranks

STOP, END = 2, 4  # epochs before the stop, and of the whole run
GRIDS = {"1x1": (1, 1), "2x1": (2, 2), "2x2": (2, 4), "4x1": (4, 4)}
SHARDED = {"2x1", "2x2"}
TICKETS = {"dense": None, "sparse": 1, "sparse later": STOP + 1}
"""When the ticket is drawn: never, before the stop, after it."""


def double() -> Net:
    """Float64 from the start: Lightning restores weights before it converts the module."""
    return Net(outer=True, tied=True).double()


def train(
    grid: str, ticket: int | None, epochs: int, folder: Path, resume: Path | None = None
) -> tuple[Record, dict[str, Any]]:
    """Train on a grid; the global batch is the same on each."""
    g_inter, ranks = GRIDS[grid]
    L.seed_everything(0, verbose=False)
    draw = (
        []
        if ticket is None
        else [EarlyBirdTicket(0.6, every="1 epoch", draw_by=f"{ticket} epochs")]
    )
    run = trainer(
        AxoSparseStrategy(g_inter, 2, save_distributed_checkpoint=grid in SHARDED),
        ranks,
        max_epochs=epochs,
        callbacks=[*draw, ModelCheckpoint(folder, filename="stop", save_top_k=-1)],
        enable_checkpointing=True,
        precision="64-true",
        use_distributed_sampler=False,  # Lightning's own would shuffle
    )
    module = double()
    data = share(run, loader(1).dataset), share(run, loader(2, batches=2).dataset)
    run.fit(module, *data, ckpt_path=resume, weights_only=False)
    record = recorded(run, module)
    drawn = dict(draw[0].ticket.masks) if draw and draw[0].ticket else {}
    return record, {"masks": drawn, "step": run.global_step, "epoch": run.current_epoch}


def stop(grid: str, folder: Path) -> None:
    for name, ticket in TICKETS.items():
        train(grid, ticket, STOP, folder / grid / name)


def resume(grid: str, folder: Path) -> dict[tuple[str, str], Any]:
    """From the next grid of the list, and with a ticket from the one behind it, too."""
    grids = list(GRIDS)
    following, other = (grids[(grids.index(grid) + step) % len(grids)] for step in (1, 2))
    return {
        (name, origin): train(
            grid, ticket, END, folder / "on", folder / origin / name / "stop.ckpt"
        )
        for name, ticket in TICKETS.items()
        for origin in ((following, other) if name == "sparse" else (following,))
    }


def on_grids(ranks: int, function: Any, folder: Path) -> dict[str, Any]:
    """What a function returns, by grid of so many ranks."""
    return {grid: function(grid, folder) for grid in GRIDS if GRIDS[grid][1] == ranks}


@cache
def on(ranks: int, function: Any, folder: Path) -> list[dict[str, Any]]:
    """The same on each of these ranks, in one job."""
    if ranks == 1:
        return [on_grids(1, function, folder)]
    return run_ranks(ranks, on_grids, ranks, function, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where :func:`stop` writes a checkpoint of every grid."""
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("through")
    return {name: train("1x1", ticket, END, path / name) for name, ticket in TICKETS.items()}


def as_file(folder: Path, grid: str, name: str) -> Path:
    """The checkpoint of a grid as one file."""
    on(GRIDS[grid][1], stop, folder)
    checkpoint = folder / grid / name / "stop.ckpt"
    assert checkpoint.is_dir() == (grid in SHARDED)
    return consolidate(checkpoint) if checkpoint.is_dir() else checkpoint


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_continues_the_run_of_another(
    grid: str, folder: Path, uninterrupted: dict[str, Any]
) -> None:
    for ranks in (1, 2, 4):
        on(ranks, stop, folder)
    for results in on(GRIDS[grid][1], resume, folder):
        for (name, origin), (record, facts) in results[grid].items():
            expected, expected_facts = uninterrupted[name]
            where = f"{name}: {origin} -> {grid}"
            assert facts["step"] == expected_facts["step"], where
            assert facts["epoch"] == expected_facts["epoch"], where
            assert facts["masks"].keys() == expected_facts["masks"].keys(), where
            for key, mask in facts["masks"].items():
                assert torch.equal(mask, expected_facts["masks"][key]), where
            for key, weight in expected.weights.items():
                assert torch.allclose(record.weights[key], weight, rtol=0, atol=1e-12), where
            if GRIDS[grid][1] == GRIDS[grid][0]:  # one replica sees the same losses
                theirs = expected.losses[-len(record.losses) :]
                assert record.losses == pytest.approx(theirs, abs=1e-12), where


def plain_checkpoint(folder: Path) -> Path:
    """The file that plain Lightning writes."""
    L.seed_everything(0, verbose=False)
    run = trainer(
        "auto",
        max_epochs=STOP,
        precision="64-true",
        callbacks=[ModelCheckpoint(folder / "plain", filename="stop", save_top_k=-1)],
        enable_checkpointing=True,
    )
    run.fit(double(), loader(1), loader(2, batches=2))
    return folder / "plain" / "stop.ckpt"


def test_the_file_is_what_one_process_writes(folder: Path) -> None:
    plain = torch.load(plain_checkpoint(folder), weights_only=False)
    for grid in GRIDS:
        file = as_file(folder, grid, "dense")
        ours = torch.load(file, weights_only=False)
        assert ours.keys() == plain.keys()
        assert list(ours["state_dict"]) == list(plain["state_dict"])
        assert ours["lr_schedulers"] == plain["lr_schedulers"]
        assert ours["loops"].keys() == plain["loops"].keys()
        for mine, theirs in zip(ours["optimizer_states"], plain["optimizer_states"], strict=True):
            assert mine["param_groups"] == theirs["param_groups"]
            assert mine["state"].keys() == theirs["state"].keys()
            for index, state in theirs["state"].items():
                for key, value in state.items():
                    assert torch.allclose(mine["state"][index][key], value, rtol=0, atol=1e-12)
        tied = [ours["state_dict"][f"model.{layer}.weight"].data_ptr() for layer in (2, 4)]
        assert tied[0] == tied[1]
        loaded = Net.load_from_checkpoint(file, outer=True, tied=True, weights_only=False)
        assert loaded.state_dict().keys() == plain["state_dict"].keys()
        file = as_file(folder, grid, "sparse")
        sparse = torch.load(file, weights_only=False)
        shapes = {k: v.shape for k, v in sparse["state_dict"].items()}
        assert shapes == {k: v.shape for k, v in plain["state_dict"].items()}
        Net.load_from_checkpoint(file, outer=True, tied=True, weights_only=False)


def test_a_plain_checkpoint_resumes_on_a_grid_and_back(folder: Path, tmp_path: Path) -> None:
    L.seed_everything(0, verbose=False)
    run = trainer("auto", max_epochs=END, precision="64-true")
    module = double()
    run.fit(
        module,
        loader(1),
        loader(2, batches=2),
        ckpt_path=as_file(folder, "2x1", "dense"),
        weights_only=False,
    )
    record, _ = train("1x1", None, END, tmp_path / "on", plain_checkpoint(tmp_path))
    for key, weight in module.state_dict().items():
        assert torch.allclose(record.weights[key], weight, rtol=0, atol=1e-12)
