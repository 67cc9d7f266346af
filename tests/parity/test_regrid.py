"""A run that moves to shorter pipelines gives the numbers of the run that never moved."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import MeanMetric

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket
from lightning_axosparse.callbacks.report.report import TrainingReport
from tests.parity.cases import (
    Net,
    Record,
    difference,
    fit,
    loaded,
    loader,
    mean_losses,
    trainer,
    whole_state,
)
from tests.ranks import run_ranks

EPOCHS, DRAW = 3, 1
REPORTED, DIVIDED = "2x1 -> 1x2", "4x1 -> 2x2"
OF_REPLICA = ("train_accuracy", "train_accuracy_step")
"""What a metric returns for a batch, which is no mean over its samples, is that of the replica."""
LAST = f"epoch={EPOCHS - 1}.ckpt"
# Row: (ranks, g_inter, regrid, stages in the end, module, optimizer, trainer).
ROWS: dict[str, tuple[int, int, Any, int, dict[str, Any], str, dict[str, Any]]] = {
    "2x1 -> 1x2": (2, 2, 1, 1, {"outer": True, "tied": True}, "adamw", {}),
    "2x1 -> 1x2, uneven": (2, 2, 1, 1, {}, "sgd", {"extra": 1, "accumulate_grad_batches": 2}),
    "2x1 -> auto": (2, 2, "auto", 1, {"outer": True}, "sgd", {}),
    "4x1 -> 2x2": (4, 4, 2, 2, {"tied": True}, "sgd", {"gradient_clip_val": 0.05}),
    "4x1 -> 1x4": (4, 4, 1, 1, {"outer": True}, "adamw", {"extra": 3}),
    "2x2 -> 1x4": (4, 2, 1, 1, {"outer": True, "tied": True}, "adamw", {"gradient_clip_val": 0.05}),
}


def unmoved(row: str) -> str:
    """The first row whose run, if it stays on its grid, is the one of ``row``."""

    def of(row: str) -> tuple[Any, ...]:
        ranks, g_inter, _, _, *options = ROWS[row]
        return ranks, g_inter, *options

    return next(other for other in ROWS if of(other) == of(row))


class Lasting(Net):
    """The same module, with gradient hooks and a metric that is never reset, but saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = MeanMetric().set_dtype(torch.float64)
        self.mean.persistent(True)

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            if name in ("scale", "model.0.weight", "model.4.weight", "model.2.weight"):
                # Of replicas each has a gradient of its own, as with ddp: so the hook is linear.
                parameter.register_hook(lambda gradient: gradient * 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.update(batch[0].double().mean(-1))
        return super().training_step(batch, batch_idx)


class Momentum(Lasting):
    """The same module, with SGD."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


def train(
    row: str, folder: Path, strategy: AxoSparseStrategy, ranks: int, resume: Path | None = None
) -> dict[str, Any]:
    """Train, test and predict; two epochs more if resumed."""
    *_, module, optimizer, options = ROWS[row]
    options = dict(options)
    extra = options.pop("extra", 0)
    L.seed_everything(0, verbose=False)
    run = trainer(
        strategy,
        ranks,
        max_epochs=EPOCHS + (2 if resume else 0),
        precision="64-true",
        callbacks=[
            EarlyBirdTicket(0.6, every="1 epoch", draw_by=f"{DRAW} epochs"),
            ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1),
            *([TrainingReport(folder)] if row == REPORTED else []),
        ],
        enable_checkpointing=True,
        **options,
    )
    model = (Lasting if optimizer == "adamw" else Momentum)(**module).double()
    record = fit(run, model, extra, ckpt_path=resume, weights_only=False)
    regridded = run.strategy.regridded
    record.weights = without_metric(record.weights)
    for values in (*record.logged, *record.validated):
        for name in OF_REPLICA:
            values.pop(name, None)
    return {
        "record": record,
        "regridded": regridded,
        "tested": run.test(model, loader(3, extra=extra), verbose=False),
        "predicted": run.predict(model, loader(3, batches=1)),
    }


class Normed(Momentum):
    """The same module with norms in its layers, whose micro-batches stay as large as they were."""

    def __init__(self) -> None:
        super().__init__()
        for index in (0, 2, 4):
            linear = self.model[index]
            self.model[index] = nn.Sequential(linear, nn.BatchNorm1d(linear.out_features))

    def on_train_start(self) -> None:
        pass


def train_norms(regrid: int | None) -> dict[str, torch.Tensor]:
    """The parameters after a training with norms, on four ranks."""
    L.seed_everything(0, verbose=False)
    run = trainer(
        AxoSparseStrategy(g_inter=4, microbatches=4, regrid=regrid, loss="mean"),
        4,
        max_epochs=EPOCHS,
        precision="64-true",
        callbacks=[EarlyBirdTicket(0.6, every="1 epoch", draw_by=f"{DRAW} epochs")],
    )
    module = Normed().double()
    run.fit(module, loader(1))
    parameters = dict(module.named_parameters())
    return {name: value for name, value in whole_state(run, module).items() if name in parameters}


def without_metric(state: dict[str, Any]) -> dict[str, Any]:
    """A state without what the metric has seen, of which each replica has its part."""
    return {name: value for name, value in state.items() if not name.startswith("mean.")}


def of_all(records: list[Record], expected: Record, is_even: bool) -> Record:
    """The record of replicas together: their losses, and logged values, are means of their own.

    Where their parts of batches are not equal, losses are those expected: what they train shows in
    weights.
    """
    logged = [
        {name: float(np.mean([each[name] for each in of_ranks])) for name in of_ranks[0]}
        for of_ranks in zip(*(record.logged for record in records), strict=True)
    ]
    losses = mean_losses(records) if is_even else expected.losses
    return replace(records[0], losses=losses, logged=logged)


def train_rows(ranks: int, folder: Path) -> dict[Any, Any]:
    found = {}
    for row, (needs, g_inter, regrid, *_) in ROWS.items():
        if needs != ranks:
            continue
        stays = [("stayed", None)] if unmoved(row) == row else []
        for name, moves in (*stays, ("moved", regrid)):
            strategy = AxoSparseStrategy(g_inter=g_inter, microbatches=4, regrid=moves)
            found[row, name] = train(row, folder / row / name, strategy, ranks)
    if ranks == 2:
        row = "2x1 -> 1x2"
        strategy = AxoSparseStrategy(g_inter=2, microbatches=4, regrid=1)
        found[row, "resumed"] = train(
            row, folder / "on", strategy, ranks, folder / row / "moved" / LAST
        )
    if ranks == 4:
        strategy = AxoSparseStrategy(g_inter=4, microbatches=4, regrid=2, shard_optimizer=True)
        found[DIVIDED, "divided"] = train(DIVIDED, folder / "divided", strategy, ranks)
        found["norms"] = train_norms(None), train_norms(2)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("regrid")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[int, list[dict[Any, Any]]]:
    """The runs of every row on every rank, by number of ranks."""
    return {n: run_ranks(n, train_rows, n, folder) for n in (2, 4)}


@pytest.mark.parametrize("row", ROWS)
def test_a_run_that_moves_equals_one_that_does_not(row: str, runs: Any, folder: Path) -> None:
    ranks, g_inter, _, stages, *_, options = ROWS[row]
    is_even = "extra" not in options
    for results in runs[ranks]:
        stayed, moved = results[unmoved(row), "stayed"], results[row, "moved"]
        assert stayed["regridded"] is None
        assert moved["regridded"].epoch == DRAW
        assert (moved["regridded"].old.g_inter, moved["regridded"].new.g_inter) == (g_inter, stages)
        own = stayed["record"], moved["record"]
        whole, together = (
            of_all([each[key]["record"] for each in runs[ranks]], own[0], is_even)
            for key in ((unmoved(row), "stayed"), (row, "moved"))
        )
        assert difference(whole, together) <= 1e-12
        assert difference(*(replace(whole, weights=each.weights) for each in own)) <= 1e-12
        assert moved["tested"][0] == pytest.approx(stayed["tested"][0], abs=1e-12)
        torch.testing.assert_close(moved["predicted"], stayed["predicted"], rtol=0, atol=1e-12)
    for epoch in range(EPOCHS):
        folders = folder / unmoved(row) / "stayed", folder / row / "moved"
        stayed, moved = loaded(*(path / f"epoch={epoch}.ckpt" for path in folders))
        for state in (stayed, moved):
            state["state_dict"] = without_metric(state["state_dict"])
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            torch.testing.assert_close(moved[part], stayed[part], rtol=0, atol=1e-12)


def test_divided_optimizer_state_moves(runs: Any) -> None:
    for results in runs[4]:
        own, divided = (results[DIVIDED, name]["record"] for name in ("moved", "divided"))
        assert difference(own, divided) <= 1e-12


def test_norms_have_the_statistics_of_micro_batches_as_large_as_before(runs: Any) -> None:
    for results in runs[4]:
        stayed, moved = results["norms"]
        torch.testing.assert_close(moved, stayed, rtol=0, atol=1e-12)


def test_the_report_tells_of_the_move(runs: Any, folder: Path) -> None:
    moved, stayed = (
        (folder / REPORTED / name / "report.html").read_text() for name in ("moved", "stayed")
    )
    assert "<h2>Regrid</h2>" in moved
    cells = re.findall(r"<td[^>]*>(.*?)</td>", moved)
    row = cells.index("bubble of equal stages")
    assert cells[row + 1 : row + 3] == ["20.0%", "0.0%"]
    assert "<h2>Regrid</h2>" not in stayed


def test_a_stopped_run_goes_on_with_shorter_pipelines(runs: Any, folder: Path) -> None:
    row = "2x1 -> 1x2"
    last = folder / row / "stayed" / LAST
    expected = train(row, folder / "alone", AxoSparseStrategy(), 1, last)
    for results in runs[2]:
        resumed = results[row, "resumed"]
        assert resumed["regridded"].epoch == EPOCHS
        together = of_all(
            [each[row, "resumed"]["record"] for each in runs[2]], expected["record"], True
        )
        assert difference(expected["record"], together) <= 1e-12
