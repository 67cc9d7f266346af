"""The folder of loggers, on all stages."""

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
"""Not on the module, whose state is put back after runs that do not count."""


class AsksForTheFolder(BoringModel):
    """Writes to `trainer.log_dir` in its step, as Lightning's documentation shows."""

    def __init__(self, fails_first: int | None) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]
        self.fails_first = fails_first

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        SEEN.append(self.trainer.log_dir)
        if len(SEEN) == 1 and self.trainer.strategy.grid.rank == self.fails_first:
            raise ValueError("only in the first run, which does not count")
        return super().training_step(batch, batch_idx)


def folders(folder: Path, fails_first: int | None, has_logger: bool) -> set[str]:
    model = AsksForTheFolder(fails_first)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_steps=2,
        default_root_dir=folder,
        logger=CSVLogger(folder, version=0) if has_logger else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        strategy=AxoSparseStrategy(g_inter=2, timeout=60),
    )
    trainer.fit(model)
    return set(SEEN)


@pytest.mark.parametrize(
    ("fails_first", "has_logger"), [(None, True), (0, True), (1, True), (None, False)]
)
def test_the_folder_is_the_same_in_all_runs_of_a_step(
    tmp_path: Path, fails_first: int | None, has_logger: bool
) -> None:
    expected = tmp_path / "lightning_logs" / "version_0" if has_logger else tmp_path
    found = run_ranks(2, folders, tmp_path, fails_first, has_logger)
    assert found == [{str(expected)}] * 2
