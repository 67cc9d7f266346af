from __future__ import annotations

from dataclasses import replace

from lightning_axosparse.callbacks.gantt import Placed, RecordedStep
from lightning_axosparse.callbacks.report.facts import TicketDraw
from lightning_axosparse.callbacks.report.plots import save_plots
from lightning_axosparse.support.trace import Span


def test_plots_are_written_for_the_data_that_is_there(facts, tmp_path):
    step = RecordedStep(0, 1, "dense", [Placed(0, Span("forward", 0, 1, 0, 0))])
    drawn = save_plots(facts, [step, step], tmp_path)
    assert drawn == ["loss.png", "mask_distance.png", "gantt.png"]
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    dense = replace(facts, draw=None, distances={})
    assert save_plots(dense, [], tmp_path) == ["loss.png"]


def test_a_ticket_drawn_before_this_training_has_no_line(facts, tmp_path):
    adopted = replace(facts, draw=TicketDraw(0.8, {"model.0.weight": 0.8}, 0.2), distances={})
    assert save_plots(adopted, [], tmp_path) == ["loss.png"]
