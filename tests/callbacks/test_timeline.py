from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_axosparse.callbacks.timeline import PipelineTimeline
from lightning_axosparse.support.trace import clock


class Timed(L.LightningModule):
    """Records a forward span per step whose micro-batch number is the step's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        with clock.span("forward", 0, 100 * self.current_epoch + batch_idx):
            return self.model(batch).mean()

    def train_dataloader(self):
        return DataLoader(torch.ones(3, 4))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder, timeline, epochs=2) -> None:
    L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        callbacks=[timeline],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Timed())


def recorded(timeline) -> list[int]:
    return [placed.span.microbatch for step in timeline.steps for placed in step.spans]


def test_records_one_step_of_the_last_epoch(tmp_path):
    timeline = PipelineTimeline()
    fit(tmp_path, timeline)
    assert [(step.epoch, step.batch_idx, step.weights) for step in timeline.steps] == [
        (1, 1, "dense")
    ]
    assert recorded(timeline) == [101]


def test_records_the_step_that_was_asked_for(tmp_path):
    timeline = PipelineTimeline(batch_idx=2, epoch=0, folder=tmp_path / "traces")
    fit(tmp_path, timeline)
    assert recorded(timeline) == [2]
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == [
        "timeline-dense.json",
        "timeline-dense.png",
    ]


def test_writes_a_trace_and_a_picture(tmp_path):
    fit(tmp_path, PipelineTimeline())
    trace = json.loads((tmp_path / "timeline-dense.json").read_text())
    [event] = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (event["name"], event["pid"], event["tid"]) == ("forward", 0, 0)
    assert event["args"] == {"micro-batch": 101}
    assert trace["otherData"] == {"epoch": 1, "batch": 1, "weights": "dense"}
    assert (tmp_path / "timeline-dense.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_never_comes_is_said(tmp_path):
    timeline = PipelineTimeline(batch_idx=7)
    with pytest.warns(UserWarning, match="recorded nothing: no batch_idx=7 in any epoch"):
        fit(tmp_path, timeline)
    assert timeline.steps == []
