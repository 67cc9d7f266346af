from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html import unescape

import pytest
import torch

from lightning_axosparse import Ticket
from lightning_axosparse.callbacks.report.page import (
    figure,
    html,
    mask_pictures,
    plots,
    save_plots,
    table,
)
from lightning_axosparse.callbacks.report.tables import Section, headline, sections, sentences
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
    return html(facts, shown, mask_pictures(TICKET))


def test_the_tables_are_those_of_the_report() -> None:
    cells = [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", made())]
    assert cells == [cell for part in sections(make_facts()) for row in part.rows for cell in row]


def test_the_page_begins_with_what_pruning_changes() -> None:
    names, numbers = (re.findall(f"<{tag}>(.*?)</{tag}>", made()) for tag in ("dt", "dd"))
    assert dict(zip(names, numbers, strict=True)) == {
        name: " → ".join(values) for name, values in headline(make_facts()).items()
    }
    assert all(f"<p>{sentence}</p>" in made() for sentence in sentences(make_facts()))


def test_columns_of_numbers_are_to_the_right_and_shares_have_bars() -> None:
    rows = [("a", "1.5", "60.0 %", "now"), ("b", "", "5 %", "3"), ("c", "+2", "", "then")]
    shown = table(Section("Cells", ("name", "number", "share", "text"), rows))
    first, *_ = re.findall(r"<tr>(<td.*)</tr>", shown)
    assert first == (
        '<td>a</td><td class="number">1.5</td>'
        '<td class="number" style="--share: 60.0%">60.0 %</td><td>now</td>'
    )


def test_the_plots_are_pictures_whose_words_can_be_read() -> None:
    found = drawn(made())
    assert list(found) == ["loss", "mask_distance", "gantt"]
    assert "optimizer step" in found["loss"]
    assert "loss (nats)" in found["loss"]
    assert "threshold" in found["mask_distance"]
    assert "epoch 1, batch 4: dense weights" in found["gantt"]


def test_steps_are_drawn_on_one_time_axis() -> None:
    short = replace(STEP, period="sparse", spans=[Span("optimizer", 20.0, 20.004, 0, None)])
    [longer, shorter] = plots(make_facts(), [STEP, short])["gantt"].axes
    assert longer.get_xlim() == shorter.get_xlim() == pytest.approx((0, 10))
    [legend] = longer.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "optimizer"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|https?:", made())


def test_a_run_that_diverged_has_a_page() -> None:
    facts = make_facts()
    ranks = [replace(rank, losses=[float("nan"), float("inf")]) for rank in facts.ranks]
    diverged = replace(facts, ranks=ranks, validations=[], distances={}, draw=None)
    shown = [figure(name, plot) for name, plot in plots(diverged, []).items()]
    assert "<table>" in html(diverged, shown, mask_pictures(None))


def test_plots_are_written_for_the_data_that_is_there(facts, tmp_path):
    written = save_plots(plots(facts, [STEP, STEP]), tmp_path)
    assert written == ["loss.png", "mask_distance.png", "gantt.png"]
    for name in written:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    dense = replace(facts, draw=None, distances={})
    assert list(plots(dense, [])) == ["loss"]
    facts.ranks[0].tokens = 0
    assert plots(facts, [])["loss"].axes[0].get_ylabel() == "loss"


def lines(facts):
    [axes] = plots(facts, [])["loss"].axes
    return axes.lines


def test_the_losses_can_be_read_back(facts):
    training, validation, ticket = lines(facts)
    assert training.get_xydata().tolist() == [[1, 4], [2, 3]]
    assert validation.get_xydata().tolist() == [[1, 2], [2, 1]]
    assert ticket.get_xdata() == [1, 1]
