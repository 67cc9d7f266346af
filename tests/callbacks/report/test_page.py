from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html import unescape

import pytest
import torch
from matplotlib.figure import Figure

from lightning_axosparse import Ticket
from lightning_axosparse.callbacks.report.facts import TicketDraw
from lightning_axosparse.callbacks.report.page import figure, html, pictures, plots, save_plots
from lightning_axosparse.callbacks.report.tables import sections
from lightning_axosparse.callbacks.timeline import RecordedStep
from lightning_axosparse.support.trace import Span
from tests.callbacks.report.runs import make_facts

STEP = RecordedStep(1, 4, "dense", [Span("forward", 10.0, 10.010, 0, 7)])
TICKET = Ticket({"model.0.weight": torch.tensor([[True, False], [True, True]])}, 0.25)


def drawn(page: str) -> dict[str, str]:
    found = re.findall(r'<img alt="(\w+)" src="data:image/svg\+xml;base64,(.*?)">', page)
    return {name: b64decode(data).decode() for name, data in found}


def made() -> str:
    facts = make_facts()
    shown = [figure(name, plot) for name, plot in plots(facts, [STEP]).items()]
    return html(facts, shown, pictures(TICKET))


def test_the_tables_are_those_of_the_report() -> None:
    cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", made())]
    assert cells == [cell for part in sections(make_facts()) for row in part.rows for cell in row]


def test_the_plots_are_pictures_whose_words_can_be_read() -> None:
    found = drawn(made())
    assert list(found) == ["loss", "mask_distance", "gantt"]
    assert "optimizer step" in found["loss"]
    assert "threshold" in found["mask_distance"]
    assert "epoch 1, batch 4: dense weights" in found["gantt"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|https?:", made())


def test_a_run_that_diverged_has_a_page() -> None:
    facts = make_facts()
    ranks = [replace(rank, losses=[float("nan"), float("inf")]) for rank in facts.ranks]
    diverged = replace(facts, ranks=ranks, validations=[], distances={}, draw=None)
    shown = [figure(name, plot) for name, plot in plots(diverged, []).items()]
    assert "<table>" in html(diverged, shown, pictures(None))


def test_plots_are_written_for_the_data_that_is_there(facts, tmp_path):
    written = save_plots(plots(facts, [STEP, STEP]), tmp_path)
    assert written == ["loss.png", "mask_distance.png", "gantt.png"]
    for name in written:
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


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.25])
def test_axes_begin_at_round_numbers_and_nothing_is_drawn_on_the_frame(facts, threshold):
    distances = {100: 0.31, 200: 0.2, 300: 0.07}
    drawn = TicketDraw(0.8, {}, 0.2, step=300)
    longer = replace(facts, distances=distances, threshold=threshold, draw=drawn)
    longer.steps[:], longer.validations[:] = [101, 300], []
    for plot in plots(longer, []).values():
        [axes] = plot.axes
        left, right = axes.get_xlim()
        bottom, top = axes.get_ylim()
        assert left == 0
        assert {bottom, top} <= set(axes.get_yticks())
        for line in axes.lines:
            for x, y in line.get_xydata():
                assert x < right or line.get_linestyle() == ":"
                assert bottom < y < top or line.get_linestyle() == "--"


def test_words_are_text_in_svg_and_long_curves_are_simplified():
    plot = Figure()
    axes = plot.subplots()
    axes.plot([value % 7 for value in range(100_000)])
    axes.set_title("a <title>")
    found = drawn(figure("a", plot))["a"]
    assert "a &lt;title&gt;" in found
    assert len(found) < 200_000
    assert "<dc:date>" not in found
