"""The same module gives the same numbers on one process and on any grid of ranks.

All rows of one number of ranks run in one job, because starting ranks takes longer than a row.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import Net, Record, difference, fit, free_port, join_ddp, trainer
from tests.ranks import run_ranks

# Row: (ranks, strategy, module, trainer, tolerance). The tolerances are those of float32 sums in
# another order; float64 agrees to its last bits.
ROWS: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], float]] = {
    "1x1": (1, {"g_inter": 1}, {}, {}, 0.0),
    "1x1, 4 micro-batches": (1, {"g_inter": 1, "microbatches": 4}, {}, {}, 5e-7),
    "loopback 4x1": (1, {"g_inter": 4, "transport": "loopback"}, {"outer": True}, {}, 5e-7),
    "2x1": (2, {"g_inter": 2, "microbatches": 4}, {}, {}, 5e-7),
    "2x1 1f1b, uneven micro-batches": (
        2,
        {"g_inter": 2, "microbatches": 3, "schedule": "1f1b"},
        {},
        {"extra": 5},
        5e-7,
    ),
    "balance, accumulation": (
        2,
        {"g_inter": 2, "balance": [1, 5]},
        {},
        {"accumulate_grad_batches": 4},
        5e-7,
    ),
    "clip by norm": (2, {"g_inter": 2}, {"outer": True}, {"gradient_clip_val": 0.05}, 1e-6),
    "clip by value, outer and tied": (
        2,
        {"g_inter": 2},
        {"outer": True, "tied": True},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        5e-7,
    ),
    "64-true": (2, {"g_inter": 2, "microbatches": 3}, {}, {"precision": "64-true"}, 1e-15),
    "3x1": (3, {"g_inter": 3, "microbatches": 4}, {"outer": True}, {}, 5e-7),
    "3x1 64-true": (3, {"g_inter": 3}, {"tied": True}, {"precision": "64-true"}, 1e-15),
    "3x1 clip, accumulation": (
        3,
        {"g_inter": 3},
        {"outer": True, "tied": True},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        1e-6,
    ),
}


def train(row: str, strategy: Any, ranks: int = 1) -> Record:
    _, _, module, options, _ = ROWS[row]
    L.seed_everything(0, verbose=False)
    options = dict(options)
    extra = options.pop("extra", 0)
    return fit(trainer(strategy, ranks, **options), Net(**module), extra)


def train_rows(ranks: int) -> dict[str, Record]:
    return {
        row: train(row, AxoSparseStrategy(**strategy), ranks)
        for row, (needs, strategy, *_) in ROWS.items()
        if needs == ranks
    }


def two_ranks(folder: Path) -> dict[str, Any]:
    return {
        **train_rows(2),
        "mixed": train_mixed(2),
        "callbacks": callbacks_on_ranks(2, folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Callable[[int], list[dict[str, Any]]]:
    """What every rank of so many found: the records of the rows, and more on two."""

    @cache
    def run(ranks: int) -> list[dict[str, Any]]:
        if ranks == 1:
            return [train_rows(1)]
        if ranks == 2:
            return run_ranks(2, two_ranks, folder)
        return run_ranks(ranks, train_rows, ranks)

    return run


@pytest.mark.parametrize("row", ROWS)
def test_a_grid_does_what_one_process_does(row: str, runs: Any) -> None:
    ranks, *_, tolerance = ROWS[row]
    expected = train(row, "auto")
    assert len(expected.losses) >= 18
    for records in runs(ranks):
        assert difference(expected, records[row]) <= tolerance


def train_mixed(ranks: int) -> Record:
    L.seed_everything(0, verbose=False)
    strategy = AxoSparseStrategy(g_inter=2, microbatches=2)
    return fit(trainer(strategy, ranks, precision="bf16-mixed"), Net())


def test_bf16_mixed_differs_by_the_rounding_of_micro_batches(runs: Any) -> None:
    L.seed_everything(0, verbose=False)
    expected = fit(trainer("auto", precision="bf16-mixed"), Net())
    for records in runs(2):
        pairs = zip(expected.losses, records["mixed"].losses, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 4e-3


def train_replicas(port: int) -> dict[str, list[Record]]:
    """Two replicas, as two pipelines of two stages and, on two ranks, with Lightning's ddp."""

    def records(make: Callable[[], Any], ranks: int) -> list[Record]:
        found = []
        clipped = {"outer": True, "tied": True}, {"gradient_clip_val": 0.1}
        for module, options in (({}, {}), clipped):
            L.seed_everything(0, verbose=False)
            found.append(fit(trainer(make(), ranks, **options), Net(**module)))
        return found

    found = {"axosparse": records(lambda: AxoSparseStrategy(g_inter=2, microbatches=4), 4)}
    if join_ddp(2, port):
        found["ddp"] = records(lambda: "ddp", 2)
    return found


def test_two_pipelines_do_what_ddp_does_on_two_processes() -> None:
    found = run_ranks(4, train_replicas, free_port())
    for rank, records in enumerate(found):
        expected = found[rank // 2]["ddp"]
        for ours, theirs in zip(records["axosparse"], expected, strict=True):
            assert difference(theirs, ours) <= 1e-6


def train_with_callbacks(ranks: int, strategy: Any, folder: Path) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, filename="{epoch}")
    stopping = EarlyStopping("val_loss", min_delta=0.5, patience=1)
    run = trainer(
        strategy, ranks, callbacks=[checkpoint, stopping], enable_checkpointing=True, max_epochs=6
    )
    record = fit(run, Net())
    return {
        "record": record,
        "best": os.path.basename(checkpoint.best_model_path),
        "score": float(checkpoint.best_model_score),
        "stopped": stopping.stopped_epoch,
        "weights": torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"],
    }


def callbacks_on_ranks(ranks: int, folder: Path) -> dict[str, Any]:
    return train_with_callbacks(ranks, AxoSparseStrategy(g_inter=2, microbatches=4), folder / "two")


def test_early_stopping_and_checkpoints_on_val_loss(runs: Any, folder: Path) -> None:
    expected = train_with_callbacks(1, "auto", folder / "one")
    assert 0 < expected["stopped"] < 5
    for result in (found["callbacks"] for found in runs(2)):
        assert result["stopped"] == expected["stopped"]
        assert result["best"] == expected["best"]
        assert result["score"] == pytest.approx(expected["score"], abs=1e-6)
        assert difference(expected["record"], result["record"]) <= 5e-7
        for name, weight in expected["weights"].items():
            assert torch.allclose(result["weights"][name], weight, atol=1e-6)
