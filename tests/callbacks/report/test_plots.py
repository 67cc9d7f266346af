from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from lightning_axosparse.callbacks.report.facts import TicketDraw
from lightning_axosparse.callbacks.report.plots import plots, save_plots, svg
from lightning_axosparse.callbacks.timeline import Placed, RecordedStep
from lightning_axosparse.support.trace import Span

STEP = RecordedStep(0, 1, "dense", [Placed(0, Span("forward", 0, 1, 0, 0))])


def test_plots_are_written_for_the_data_that_is_there(facts, tmp_path):
    drawn = save_plots(plots(facts, [STEP, STEP]), tmp_path)
    assert drawn == ["loss.png", "mask_distance.png", "gantt.png"]
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    dense = replace(facts, draw=None, distances={})
    assert list(plots(dense, [])) == ["loss"]


def lines(facts):
    [axes] = plots(facts, [])["loss"].axes
    return axes.lines


def test_a_ticket_drawn_before_this_training_has_no_line(facts):
    adopted = replace(facts, draw=TicketDraw(0.8, {"model.0.weight": 0.8}, 0.2), distances={})
    assert [line.get_label() for line in lines(adopted)] == ["training", "validation"]


def test_the_losses_can_be_read_back(facts):
    training, validation, ticket = lines(facts)
    assert training.get_xydata().tolist() == [[1, 4], [2, 3]]
    assert validation.get_xydata().tolist() == [[1, 2], [2, 1]]
    assert ticket.get_xdata() == [1, 1]


def test_words_are_text_in_svg_and_long_curves_are_simplified():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([value % 7 for value in range(100_000)])
    axes.set_title("a <title>")
    found = svg(figure).decode()
    assert "a &lt;title&gt;" in found
    assert len(found) < 200_000
    assert "<dc:date>" not in found
