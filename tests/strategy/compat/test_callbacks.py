"""ThroughputMonitor and loggers: what they are told of replicas and stages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_axosparse import AxoSparseStrategy
from lightning_axosparse.strategy.compat.callbacks import count_replicas
from tests.ranks import run_ranks


def rates(replicas: int, available_flops: float | None = 1000) -> dict[str, Any]:
    """What is logged on a rank of four that has trained on 5 samples in 2 seconds."""
    monitor: Any = ThroughputMonitor(len)
    monitor.available_flops = available_flops
    monitor._throughputs = {"train": Throughput(available_flops, world_size=4, window_size=2)}
    trainer: Any = SimpleNamespace(callbacks=[monitor], world_size=4)
    for _ in range(2):  # Another setup changes nothing.
        count_replicas(trainer, replicas)
    throughput = monitor._throughputs["train"]
    throughput.update(time=1, batches=1, samples=5, flops=600)
    throughput.update(time=3, batches=2, samples=10, flops=600)
    return throughput.compute()


def test_stages_of_a_replica_count_once() -> None:
    logged = rates(replicas=2)
    assert logged["device/samples_per_sec"] == 2.5
    assert logged["samples_per_sec"] == 5
    assert logged["flops_per_sec"] == 600


def test_flops_are_compared_with_those_of_all_stages() -> None:
    assert [rates(replicas)["device/mfu"] for replicas in (1, 2, 4)] == [0.075, 0.15, 0.3]
    assert "device/mfu" not in rates(2, available_flops=None)


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
