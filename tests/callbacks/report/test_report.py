from __future__ import annotations

import csv
import json
import struct

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboardX.proto.event_pb2 import Event

from lightning_axosparse import (
    AxoSparseStrategy,
    EarlyBirdTicket,
    GradualPruning,
    PipelineTimeline,
    Ticket,
)
from lightning_axosparse.callbacks.report.facts import RunResult
from lightning_axosparse.callbacks.report.page import plots, save_plots
from lightning_axosparse.callbacks.report.report import TrainingReport, log_pictures
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT
from tests.quiet import QUIET

EPOCHS, BATCHES = 3, 3
PERIODS = ("dense", "sparse")
PARTS = ("compute", "waiting", "all-reduce", "optimizer", "densify_and_compress", "other")


class Losses(L.Callback):
    """Every training and validation loss as it was logged."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.training.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer, pl_module):
        self.validation.append(float(trainer.callback_metrics["val_loss"]))


@pytest.fixture
def data(tmp_path) -> TextDataModule:
    path = tmp_path / "text.txt"
    path.write_text("All the world is a stage, and all the men and women merely players. " * 60)
    return TextDataModule(path, context=16, batch_size=8)


def run(data, folder, *callbacks, test=False, **options) -> tuple[GPT, TrainingReport, Losses]:
    L.seed_everything(0)
    model = GPT(width=16, depth=2, heads=2, context=16)
    report, losses = TrainingReport(folder), Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        limit_train_batches=BATCHES,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[report, losses, *callbacks],
        **{**QUIET, **options},
    )
    trainer.fit(model, datamodule=data)
    if test:
        trainer.test(model, datamodule=data, verbose=False)
    return model, report, losses


def test_one_rank_before_and_after_the_draw(data, tmp_path):
    search = EarlyBirdTicket(pruning_ratio=0.75, window=2, every="1 epoch", draw_by="2 epochs")
    model, report, losses = run(
        data,
        tmp_path,
        search,
        PipelineTimeline(),
        devices=1,
        strategy=AxoSparseStrategy(g_inter=2, transport="loopback", loss="mean", in_flight=3),
    )
    facts = report.facts
    assert facts.losses == pytest.approx(losses.training)
    assert facts.steps == list(range(1, EPOCHS * BATCHES + 1))
    assert [v.loss for v in facts.validations] == pytest.approx(losses.validation)
    assert [v.period for v in facts.validations] == ["dense", "dense", "sparse"]
    assert facts.dense_validation.epoch == 1
    assert facts.final_validation.epoch == 2
    assert facts.draw.step == 2 * BATCHES
    assert facts.distances == search.distances
    assert list(facts.distances) == [2 * BATCHES]
    [rank] = facts.ranks
    assert {period: work.steps for period, work in rank.work.items()} == {"dense": 6, "sparse": 3}
    assert all(work.reduced_bytes == 0 for work in rank.work.values())
    assert all(work.in_flight == 3 for work in rank.work.values())
    assert all(work.peak_in_flight[0] == 3 for work in rank.work.values())

    entries = sum(parameter.numel() for parameter in model.parameters())
    pruned = sum(mask.numel() for mask in search.ticket.masks.values())
    kept = sum(int(mask.sum()) for mask in search.ticket.masks.values())
    dense, sparse = rank.work["dense"].state, rank.work["sparse"].state
    assert (dense["weights"], dense["indices"]) == (4 * entries, 0)
    assert sparse["weights"] == 4 * (entries - pruned + kept)
    assert kept < sparse["indices"] < 2 * kept
    assert sparse["optimizer"] - 8 * (entries - pruned + kept) == dense["optimizer"] - 8 * entries

    for work in rank.work.values():
        seconds = work.seconds_per_step()
        assert seconds["compute"] > 0
        assert seconds["optimizer"] > 0
        assert seconds["other"] >= 0
    assert rank.work["dense"].seconds_per_step()["densify, compress"] == 0
    assert rank.work["sparse"].seconds_per_step()["densify, compress"] > 0
    written = {path.name for path in tmp_path.iterdir()}
    pictures = {"loss.png", "mask_distance.png", "gantt.png"}
    assert pictures | {"report.json", "report.html"} <= written
    assert (tmp_path / "report.html").read_text().count('<figure class="masks">') == len(
        search.ticket.masks
    )
    assert Ticket.load(tmp_path / "ticket.pt") == search.ticket

    assert facts.tokens_per_parameter == EPOCHS * BATCHES * 8 * 16 / entries
    result = RunResult.of(facts, {"seed": 0})
    assert result.parameters == entries
    assert result.density == pytest.approx(kept / pruned)
    assert result.state_bytes == {"dense": [sum(dense.values())], "sparse": [sum(sparse.values())]}
    assert (result.stages, result.replicas, result.steps) == (1, 1, EPOCHS * BATCHES)


def test_two_replicas_reduce_the_kept_entries_alone(data, tmp_path):
    search = EarlyBirdTicket(pruning_ratio=0.75, window=2, every="1 epoch", draw_by="1 epoch")
    timeline = PipelineTimeline()
    logger = CSVLogger(tmp_path)
    options = {"devices": 2, "strategy": AxoSparseStrategy(), "logger": logger}
    options["log_every_n_steps"] = 2
    model, report, losses = run(data, tmp_path, search, timeline, test=True, **options)
    facts = report.facts
    assert [(rank.rank, rank.stage, rank.replica) for rank in facts.ranks] == [(0, 0, 0), (1, 0, 1)]
    assert facts.ranks[0].losses == pytest.approx(losses.training)
    assert facts.ranks[0].losses != facts.ranks[1].losses
    entries = sum(parameter.numel() for parameter in model.parameters())
    removed = sum(int((~mask).sum()) for mask in search.ticket.masks.values())
    for rank in facts.ranks:
        assert rank.work["dense"].reduced_bytes == 4 * entries
        assert rank.work["sparse"].reduced_bytes == 4 * (entries - removed)
    assert [step.rows for step in timeline.steps] == [[(0, 0), (1, 0)]] * 2
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["test"]["loss"] == pytest.approx(facts.test_loss)

    [metrics] = tmp_path.rglob("metrics.csv")
    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    logged = [row for row in rows if row["state_bytes"]]
    # The state does not change within a period.
    periods = [[rank.work[period].state_bytes for rank in facts.ranks] for period in PERIODS]
    assert [int(float(row["state_bytes"])) for row in logged] == [sum(each) for each in periods]
    for name, pruned in search.ticket.layer_sparsity().items():
        assert logged[0][f"density/{name}"] == ""
        assert float(logged[1][f"density/{name}"]) == pytest.approx(1 - pruned)

    timed = [row for row in rows if row["seconds_per_batch/all"]]
    assert len(timed) == EPOCHS * BATCHES // 2
    for row in timed:
        parts = {name: float(row[name]) for name in row if name.startswith("seconds_per_batch/")}
        whole = parts.pop("seconds_per_batch/all")
        assert parts.keys() == {f"seconds_per_batch/{part}" for part in PARTS}
        assert sum(parts.values()) == pytest.approx(whole)
        assert int(float(row["in_flight"])) >= 1
    reduced = [sum(r.work[period].reduced_bytes for r in facts.ranks) for period in PERIODS]
    assert [int(float(timed[at]["reduced_bytes"])) for at in (0, -1)] == reduced


def test_a_ticket_that_was_given_leaves_no_dense_period(data, tmp_path):
    model = GPT(width=16, depth=2, heads=2, context=16)
    masks = {
        name: parameter.abs() > parameter.abs().median()
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
    }
    search = GradualPruning(ticket=Ticket(masks, 0.5, step=7))
    _, report, _ = run(data, tmp_path, search, devices=1, strategy=AxoSparseStrategy())
    assert list(report.facts.ranks[0].work) == ["sparse"]
    assert report.facts.draw.step is None
    assert report.facts.dense_validation is None


def test_plain_lightning_needs_no_ticket_and_no_grid(data, tmp_path):
    _, report, losses = run(data, tmp_path, devices=1, test=True, accumulate_grad_batches=2)
    assert report.facts.losses == pytest.approx(losses.training)
    assert report.facts.steps == [0, 1, 2, 2, 3, 4, 4, 5, 6]
    assert report.facts.draw is None
    assert report.facts.test_loss is not None
    assert "<h1>Training report</h1>" in (tmp_path / "report.html").read_text()


class Skipping(GPT):
    """Returns no loss of the second batch, and of the third none on the second replica."""

    def __init__(self, **shape):
        super().__init__(**shape)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        skips = batch_idx == 1 or (batch_idx == 2 and self.trainer.global_rank == 1)
        return None if skips else loss


def test_batches_that_replicas_skip(data, tmp_path):
    report = TrainingReport(tmp_path)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=AxoSparseStrategy(),
        max_steps=3,
        limit_val_batches=0,
        callbacks=report,
        **QUIET,
    )
    trainer.fit(Skipping(width=16, depth=2, heads=2, context=16), datamodule=data)
    first, second = (rank.losses for rank in report.facts.ranks)
    assert (first[1], second[1:]) == (None, [None, None])
    assert report.facts.losses == [(first[0] + second[0]) / 2, None, first[2]]
    assert json.loads((tmp_path / "report.json").read_text())["losses"] == report.facts.losses


class WithImages:
    """Takes images as loggers of Lightning such as Weights & Biases do."""

    def __init__(self):
        self.logged = []

    def log_image(self, key, images, step=None):
        self.logged.append((key, images, step))


@pytest.fixture
def pictures(facts, tmp_path):
    return save_plots(plots(facts, []), tmp_path)


def events(folder):
    """The events in TensorBoard's file, which is a TFRecord."""
    [file] = folder.rglob("events.out.*")
    content, position, found = file.read_bytes(), 0, []
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        found.append(Event.FromString(content[position + 12 : position + 12 + length]))
        position += 12 + length + 4
    return found


def test_tensorboard_gets_every_picture(pictures, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    log_pictures([logger], tmp_path, pictures, 7)
    logger.experiment.close()  # a flush does not wait for the thread that writes
    shown = [(v.tag, e.step, v.image) for e in events(tmp_path) for v in e.summary.value]
    assert [(tag, step) for tag, step, _ in shown] == [("loss", 7), ("mask_distance", 7)]
    assert all(image.encoded_image_string.startswith(b"\x89PNG") for _, _, image in shown)
    assert (shown[0][2].width, shown[0][2].height) == (960, 540)


def test_a_logger_for_images_gets_their_files_and_others_none(pictures, tmp_path):
    logger = WithImages()
    log_pictures([CSVLogger(tmp_path), logger], tmp_path, pictures, 7)
    assert logger.logged == [
        (name.removesuffix(".png"), [str(tmp_path / name)], 7) for name in pictures
    ]
