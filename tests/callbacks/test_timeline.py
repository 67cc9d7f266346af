from __future__ import annotations

import json

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader

from lightning_axosparse import GradualPruning
from lightning_axosparse.callbacks.timeline import (
    COLOURS,
    PipelineTimeline,
    RecordedStep,
    assign_rows,
    chrome_trace,
    plot_gantt,
)
from lightning_axosparse.support.trace import Span, clock
from tests.callbacks import small
from tests.quiet import QUIET


@st.composite
def recorded_steps(draw) -> RecordedStep:
    def span() -> Span:
        start = draw(st.floats(1.7e9, 1.7e9 + 1))
        end = start + draw(st.floats(0, 1))
        microbatch = draw(st.none() | st.integers(0, 7))
        activity, stage, replica = draw(st.sampled_from(list(COLOURS))), draw(stages), draw(stages)
        return Span(activity, start, end, stage, microbatch, replica)

    stages = st.integers(0, 3)
    count = draw(st.integers(0, 12))
    return RecordedStep(3, 1, "dense", [span() for _ in range(count)])


@given(step=recorded_steps())
def test_trace_is_valid_and_complete(step):
    trace = json.loads(json.dumps(chrome_trace(step)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(spans) == len(step.spans)
    for event, span in zip(spans, step.spans, strict=True):
        assert event["name"] == span.activity
        assert (event["pid"], event["tid"]) == (span.replica, span.stage)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["args"].get("micro-batch") == span.microbatch
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert named == {row: f"stage {row[1]}" for row in step.rows}
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    assert processes == {replica: f"replica {replica}" for replica, _ in step.rows}


def test_trace_is_in_microseconds_from_the_first_span():
    spans = [Span("backward", 10.5, 10.75, 1, 0), Span("forward", 10.25, 10.5, 0, 0)]
    step = RecordedStep(0, 1, "sparse", assign_rows(spans, replica=2, stage=0))
    events = [event for event in chrome_trace(step)["traceEvents"] if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in events] == [(250000, 250000), (0, 250000)]


def test_what_knows_no_stage_takes_the_one_of_the_pass_around_it():
    passes = [Span("forward", 0, 4, 0, 0), Span("backward", 4, 9, 3, 0)]
    inner = [Span("densify", 1, 2, 0, None), Span("compress", 5, 6, 0, None)]
    outer = [Span("optimizer", 9, 10, 0, None)]
    placed = assign_rows([*inner, *passes, *outer], replica=1, stage=2)
    assert [p.stage for p in placed] == [0, 3, 0, 3, 2]
    assert {p.replica for p in placed} == {1}


def test_gantt_draws_every_span_in_its_row():
    spans = [
        Span("forward", 1, 2, 0, 0),
        Span("backward", 2, 4, 0, 0),
        Span("wait", 4, 4.5, 0, None),
    ]
    other = [Span("forward", 1, 2, 1, 0)]
    step = RecordedStep(2, 1, "dense", assign_rows(spans, 0, 0) + assign_rows(other, 1, 1))
    axes = Figure().subplots()
    plot_gantt(axes, step)
    bars = [(bar.get_x(), bar.get_width(), bar.get_y() + 0.4) for bar in axes.patches]
    assert bars == [(0, 1000, 0), (1000, 2000, 0), (3000, 500, 0), (0, 1000, 1)]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["replica 0, stage 0", "replica 1, stage 1"]
    assert [text.get_text() for text in axes.texts] == ["0", "0", "0"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["forward", "backward", "wait"]


def test_an_empty_step_can_be_drawn_and_traced():
    step = RecordedStep(0, 0, "dense", [])
    plot_gantt(Figure().subplots(), step)
    assert chrome_trace(step)["traceEvents"] == []


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
        **QUIET,
    ).fit(Timed())


def recorded(timeline) -> list[int]:
    return [span.microbatch for step in timeline.steps for span in step.spans]


def test_records_one_step_of_the_last_epoch(tmp_path):
    timeline = PipelineTimeline()
    fit(tmp_path, timeline)
    assert [(step.epoch, step.batch_idx, step.period) for step in timeline.steps] == [
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


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (18, {"dense": (0, 1), "pruning": (4, 1), "sparse": (4, 3)}),
        (19, {"dense": (0, 1), "pruning": (4, 1), "sparse": (4, 3)}),
        (6, {"dense": (0, 1), "pruning": (1, 1), "sparse": (4, 1)}),
    ],
)
def test_a_step_after_the_draw_is_recorded_wherever_it_falls(end, expected, tmp_path):
    timeline = PipelineTimeline(folder=tmp_path)
    small.fit(GradualPruning(0.5, start=4, end=end, every=1), 5, callbacks=[timeline])
    steps = {step.period: (step.epoch, step.batch_idx) for step in timeline.steps}
    assert steps == expected
    names = {f"timeline-{weights}.{kind}" for weights in expected for kind in ("json", "png")}
    assert {path.name for path in tmp_path.iterdir()} == names
