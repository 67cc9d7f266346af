"""Callbacks, the tuner, clocks and metrics of windows do on ranks what they do on one process."""

from __future__ import annotations

import csv
import tempfile
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import Running

from lightning_axosparse import AxoSparseStrategy
from tests.parity.cases import CLASSES, Net, Record, difference, fit, loader, trainer
from tests.ranks import run_ranks


class Windows(Net):
    """Metrics over the last batches, updated and called."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Running(MeanMetric(), window=4)
        self.hits = Running(MulticlassAccuracy(CLASSES, average="micro"), window=3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.mean.update(loss.detach(), len(y))
        self.log("present", self.hits(logits, y))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log_dict({"mean": self.mean.compute(), "hits": self.hits.compute()})


class Writer(BasePredictionWriter):
    """Appends to a file what it is given."""

    def __init__(self, path: Path, interval: Any) -> None:
        super().__init__(interval)
        self.path = path

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        indices, _, batch_idx, _ = args
        self.write(f"batch {batch_idx}: {list(prediction.shape)}, samples {indices}")

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.write(f"epoch: {len(predictions)}, samples {indices}")

    def write(self, line: str) -> None:
        with self.path.open("a") as file:
            print(line, file=file)


def train(folder: Path, strategy: Any, ranks: int = 1) -> tuple[Record, list[dict[str, str]]]:
    """What was recorded and, where this rank logs, what was logged."""
    L.seed_everything(0, verbose=False)
    callbacks = [
        GradientAccumulationScheduler({1: 2}),
        LearningRateMonitor(logging_interval="step"),
        DeviceStatsMonitor(),
        ModelSummary(),
        Timer("00:01:00:00"),
        EarlyStopping("val_loss", patience=0, stopping_threshold=1.6),
    ]
    logger = CSVLogger(folder)
    run = trainer(strategy, ranks, callbacks=callbacks, logger=logger, log_every_n_steps=1)
    record = fit(run, Windows())
    file = Path(logger.log_dir) / "metrics.csv"
    rows = list(csv.DictReader(file.open())) if run.is_global_zero else []
    return record, rows


def predict(folder: Path, strategy: Any, ranks: int = 1) -> list[str]:
    """What writers have written."""
    L.seed_everything(0, verbose=False)
    path = folder / "written"
    writers = [Writer(path, interval) for interval in ("batch", "epoch", "batch_and_epoch")]
    run = trainer(strategy, ranks, callbacks=writers)
    run.predict(Net(), loader(1, batches=2), return_predictions=False)
    run.strategy.barrier()
    run.validate(Net(), loader(1, batches=1), verbose=False)  # writers are as they were
    assert all("write_on_batch_end" not in vars(writer) for writer in writers)
    return path.read_text().splitlines()


def learning_rates(strategy: Any, ranks: int = 1) -> dict[str, list[float]]:
    L.seed_everything(0, verbose=False)
    module = Net()
    module.lr = 0.1
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=module.lr)
    run = trainer(strategy, ranks, default_root_dir=tempfile.gettempdir())
    found = Tuner(run).lr_find(module, loader(1), num_training=20, update_attr=True)
    return {**found.results, "chosen": [module.lr]}


def timed(strategy: Any, ranks: int = 1) -> tuple[list[int], set[str]]:
    """After which steps a rank validates and, where this rank measures them, the names of rates.

    The first rank's clock alone says after the third step that validation is due.
    """
    steps: list[int] = []
    throughput = ThroughputMonitor(lambda batch: len(batch[0]), window_size=2)
    asked = count(1)
    run = trainer(
        strategy,
        ranks,
        callbacks=[
            LambdaCallback(on_validation_start=lambda run, _: steps.append(run.global_step)),
            throughput,
        ],
        max_epochs=1,
        num_sanity_val_steps=0,
        val_check_interval=timedelta(hours=1),
    )

    def clock() -> float:
        is_due = next(asked) == 3 and run.is_global_zero
        return time.monotonic() + (7200 if is_due else 0)

    loop = "lightning.pytorch.loops.training_epoch_loop.time"
    with mock.patch(loop, SimpleNamespace(monotonic=clock)):
        run.fit(Net(), loader(1), loader(2, batches=1))
    measured = throughput._throughputs[RunningStage.TRAINING]
    return steps, set(measured.compute()) if run.is_global_zero else set()


def strategy(**options: Any) -> AxoSparseStrategy:
    return AxoSparseStrategy(2, microbatches=2, pipeline="model", **options)


def everything(folder: Path, **options: Any) -> tuple[Any, ...]:
    ranks = 1 if options else 2
    return (
        train(folder, strategy(**options), ranks),
        predict(folder, strategy(**options), ranks),
        learning_rates(strategy(**options), ranks),
        timed(strategy(**options), ranks),
    )


@pytest.fixture(scope="module", params=["ranks", "one process"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("runs")
    if request.param == "ranks":
        return run_ranks(2, everything, folder)
    return [everything(folder, transport="loopback")]


def test_callbacks_and_windows_of_batches(runs: list[Any], tmp_path: Path) -> None:
    expected, rows = train(tmp_path, "auto")
    assert len({logged.get("mean") for logged in expected.logged}) > 4
    for (record, ours), *_ in runs:
        assert difference(expected, record) <= 1e-6
        assert [row.keys() for row in ours] in ([row.keys() for row in rows], [])
        rates = [[row["lr-AdamW/pg1"] for row in each] for each in (ours, rows)]
        assert rates[0] in (rates[1], [])
    assert len(runs[0][0][1]) == len(rows)


def test_predictions_are_written_once(runs: list[Any], tmp_path: Path) -> None:
    written = predict(tmp_path, "auto")
    assert len(written) == 2 * 2 + 2
    for _, ours, *_ in runs:
        assert sorted(ours) == sorted(written)


def test_learning_rates_are_found(runs: list[Any]) -> None:
    expected = learning_rates("auto")
    launched = learning_rates(strategy(), ranks=2)
    for found in [*(found for _, _, found, _ in runs), launched]:
        assert found["lr"] == expected["lr"]
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert found["chosen"] == expected["chosen"] != [0.1]


def test_all_ranks_validate_when_the_clock_of_one_says_so(runs: list[Any]) -> None:
    steps, names = timed("auto")
    assert steps == [3]
    assert "device/samples_per_sec" in names
    assert [ours for *_, (ours, _) in runs] == [steps] * len(runs)
    *_, (_, measured) = runs[0]
    assert measured - {"batches_per_sec", "samples_per_sec"} == names  # those of all ranks


def test_a_batch_size_is_sought_on_one_process() -> None:
    class Data(L.LightningDataModule):
        batch_size = 2

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(loader(1).dataset, self.batch_size)

        val_dataloader = train_dataloader

    def scale(strategy: Any) -> int:
        tuner = Tuner(trainer(strategy, default_root_dir=tempfile.gettempdir()))
        return tuner.scale_batch_size(Net(), datamodule=Data(), steps_per_trial=1, max_trials=2)

    assert scale(strategy(transport="loopback")) == scale("auto")
