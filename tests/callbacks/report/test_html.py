from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html import unescape

import torch

from lightning_axosparse import Ticket
from lightning_axosparse.callbacks.report.html import html
from lightning_axosparse.callbacks.report.plots import plots
from lightning_axosparse.callbacks.report.tables import sections
from lightning_axosparse.callbacks.timeline import Placed, RecordedStep
from lightning_axosparse.support.trace import Span
from tests.callbacks.report.runs import make_facts

STEP = RecordedStep(1, 4, "dense", [Placed(0, Span("forward", 10.0, 10.010, 0, 7))])
TICKET = Ticket({"model.0.weight": torch.tensor([[True, False], [True, True]])}, 0.25)


def made() -> str:
    facts = make_facts()
    return html(facts, plots(facts, [STEP]), TICKET)


def test_the_tables_are_those_of_the_report() -> None:
    cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", made())]
    assert cells == [cell for part in sections(make_facts()) for row in part.rows for cell in row]


def test_the_plots_are_pictures_whose_words_can_be_read() -> None:
    found = re.findall(r'<img alt="(\w+)" src="data:image/svg\+xml;base64,(.*?)">', made())
    drawn = {name: b64decode(data).decode() for name, data in found}
    assert list(drawn) == ["loss", "mask_distance", "gantt"]
    assert "optimizer step" in drawn["loss"]
    assert "threshold" in drawn["mask_distance"]
    assert "epoch 1, batch 4: dense weights" in drawn["gantt"]


def test_nothing_is_loaded_from_elsewhere() -> None:
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|https?:", made())


def test_a_run_that_diverged_has_a_page() -> None:
    facts = make_facts()
    ranks = [replace(rank, losses=[float("nan"), float("inf")]) for rank in facts.ranks]
    diverged = replace(facts, ranks=ranks, validations=[], distances={}, draw=None)
    assert "<table>" in html(diverged, plots(diverged, []), None)
