"""A step that runs without a trace finds the folder of the loggers, and writes nothing there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from tests.ranks import run_ranks

SEEN: list[Any] = []
"""Not on the module, whose state is put back after a dry run."""


class AsksForTheFolder(BoringModel):
    """Writes to `trainer.log_dir` in its step, as Lightning's documentation shows."""

    def __init__(self, fails_first: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]
        self.fails_first = fails_first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        SEEN.append(self.trainer.log_dir)
        if self.fails_first and len(SEEN) == 1 and self.global_rank == 0:
            raise ValueError("only in the check of the first batch")
        return super().training_step(batch, batch_idx)


def folders(folder: Path, fails_first: bool) -> set[str]:
    model = AsksForTheFolder(fails_first)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=2,
        logger=CSVLogger(folder, version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        strategy=AxoSparseStrategy(g_inter=2, timeout=60),
    )
    trainer.fit(model)
    return set(SEEN)


@pytest.mark.parametrize("fails_first", [False, True])
def test_the_folder_of_a_dry_run_is_that_of_training(tmp_path: Path, fails_first: bool) -> None:
    expected = str(tmp_path / "lightning_logs" / "version_0")
    assert run_ranks(2, folders, tmp_path, fails_first) == [{expected}] * 2
