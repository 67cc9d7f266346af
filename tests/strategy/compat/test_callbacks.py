"""Loggers on all stages: their folder, and the graph of the whole module."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from tests.quiet import QUIET
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
    SEEN.clear()
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


def folders_of_all(folder: Path) -> list[set[str]]:
    """One run after the other: as usual, with first runs that fail on a rank, without a logger."""
    logged = [folders(folder / str(rank), rank, has_logger=True) for rank in (None, 0, 1)]
    return [*logged, folders(folder, None, has_logger=False)]


def test_the_folder_is_the_same_in_all_runs_of_a_step(tmp_path: Path) -> None:
    logs = [tmp_path / name / "lightning_logs" / "version_0" for name in ("None", "0", "1")]
    expected = [{str(path)} for path in (*logs, tmp_path)]
    assert run_ranks(2, folders_of_all, tmp_path) == [expected] * 2


class LogsGraphs(TensorBoardLogger):
    """Records which layers the graph has; TensorBoard itself need not be installed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._log_graph = True
        self.layers: list[set[str]] = []

    @property
    def experiment(self) -> Any:
        return MagicMock(add_graph=self._record_graph)

    def _record_graph(self, module: L.LightningModule, example: Any) -> None:
        graph = torch.jit.trace(module, example).inlined_graph
        names = (str(node.scopeName()) for node in graph.nodes())
        self.layers.append({name.rpartition("/")[2] for name in names} - {""})


class Whole(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, 32)
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]


class InParts(Whole):
    def configure_model(self) -> None:
        self.layer = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 2))  # type: ignore[assignment]


def layers_of_graphs(folder: Path, module: Whole) -> list[set[str]]:
    logger = LogsGraphs(folder)
    trainer = L.Trainer(
        **{**QUIET, "logger": logger},
        accelerator="cpu",
        devices=2,
        max_steps=1,
        limit_val_batches=0,
        strategy=AxoSparseStrategy(g_inter=2),
    )
    no_graph = pytest.warns(match="writes no graph")
    with no_graph if type(module) is InParts and trainer.is_global_zero else nullcontext():
        trainer.fit(module)
    assert logger._log_graph
    return logger.layers


def graphs_of_both(folder: Path) -> list[list[set[str]]]:
    return [layers_of_graphs(folder, module) for module in (Whole(), InParts())]


def test_the_graph_of_tensorboard_has_the_layers_of_all_stages(tmp_path: Path) -> None:
    first, other = run_ranks(2, graphs_of_both, tmp_path)
    assert first == [[{"__module.layer.0", "__module.layer.1"}], []]
    assert other == [[], []]
