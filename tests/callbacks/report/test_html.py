"""The page of a run, as a browser shows it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

import pytest
import torch

from lightning_axosparse import Ticket
from lightning_axosparse.callbacks.gantt import Placed, RecordedStep
from lightning_axosparse.callbacks.report.charts import LEFT, RIGHT, Curve, line_chart
from lightning_axosparse.callbacks.report.html import html
from lightning_axosparse.callbacks.report.tables import sections
from lightning_axosparse.support.trace import Span
from tests.browser import opened
from tests.callbacks.report.runs import make_facts

SPANS = [
    Span("forward", 10.0, 10.010, 0, 0),
    Span("backward", 10.020, 10.045, 0, 0),
    Span("wait", 10.010, 10.020, 0, 0),
    Span("densify", 10.002, 10.004, 0, None),
]
STEP = RecordedStep(1, 4, "dense", [Placed(0, span) for span in SPANS])
TICKET = Ticket({"model.0.weight": torch.tensor([[True, False], [True, True]])}, 0.25)

# What a user does, and afterwards what the page shows of it.
ZOOM = """
<script>
const gantt = [...document.querySelectorAll("svg.zooms")].at(-1);
const box = gantt.getBoundingClientRect();
const seen = () => [...gantt.querySelectorAll(".ticks text")].map(text => Number(text.textContent));
const middle = { clientX: box.left + box.width * 0.555, clientY: box.top + 40, bubbles: true };
const views = { whole: seen() };
gantt.dispatchEvent(new WheelEvent("wheel", { ...middle, deltaY: -700, cancelable: true }));
views.zoomed = seen();
gantt.dispatchEvent(new PointerEvent("pointerdown", middle));
window.dispatchEvent(new PointerEvent("pointermove", { clientX: middle.clientX - 100 }));
window.dispatchEvent(new PointerEvent("pointerup", {}));
window.dispatchEvent(new PointerEvent("pointermove", { clientX: middle.clientX + 100 }));
views.moved = seen();
gantt.dispatchEvent(new MouseEvent("dblclick", middle));
views.reset = seen();
document.body.insertAdjacentHTML("beforeend", `<pre id="views">${JSON.stringify(views)}</pre>`);
</script>
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The document, after a user has zoomed into the last chart."""
    folder = tmp_path_factory.mktemp("browser")
    page = folder / "report.html"
    page.write_text(html(make_facts(), [STEP], TICKET).replace("</body>", ZOOM + "</body>"))
    document, console = opened(page, folder)
    assert console == []
    return document


def test_the_tables_are_those_of_the_report(shown: str) -> None:
    cells = [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", shown)]
    assert cells == [cell for part in sections(make_facts()) for row in part.rows for cell in row]


def curve(document: str, name: str) -> list[tuple[float, float]]:
    """The points of a curve, read back from the picture."""
    chart = next(c for c in document.split("<svg class=") if f'data-name="{name}"' in c)
    low, high = (float(re.search(f'data-{end}="(.*?)"', document)[1]) for end in ("low", "high"))
    labels = re.findall(r'<text x="114" y="([\d.]+)" text-anchor="end">([\d.]+)<', document)
    (y0, bottom), *_, (y1, top) = ((float(y) - 4, float(value)) for y, value in labels[:3])
    points = re.search(rf'data-name="{name}" points="(.*?)"', chart)[1]
    pairs = [tuple(map(float, pair.split(","))) for pair in points.split()]
    return [
        (
            low + (x - LEFT) / (RIGHT - LEFT) * (high - low),
            bottom + (y - y0) / (y1 - y0) * (top - bottom),
        )
        for x, y in pairs
    ]


@pytest.mark.parametrize("name", ["training", "validation"])
def test_the_losses_can_be_read_back(shown: str, name: str) -> None:
    facts = make_facts()
    losses = {
        "training": list(zip(facts.steps, facts.losses, strict=True)),
        "validation": [(v.step, v.loss) for v in facts.validations],
    }
    for found, expected in zip(curve(shown, name), losses[name], strict=True):
        assert found == pytest.approx(expected, abs=0.01)


def test_every_span_has_its_times(shown: str) -> None:
    tooltips = re.findall(r"<rect [^>]*><title>(.*?)</title>", shown)
    assert tooltips == [
        "forward, micro-batch 0: 0.000 to 10.000 ms",
        "backward, micro-batch 0: 20.000 to 45.000 ms",
        "wait, micro-batch 0: 10.000 to 20.000 ms",
        "densify: 2.000 to 4.000 ms",
    ]


def test_the_wheel_zooms_dragging_moves_and_a_double_click_shows_all(shown: str) -> None:
    views = json.loads(re.findall(r'<pre id="views">(.*?)</pre>', shown)[-1])
    assert views["whole"] == views["reset"] == [0, 10, 20, 30, 40]
    zoomed, moved = views["zoomed"], views["moved"]
    assert 15 < min(zoomed) < 22.5 < max(zoomed) < 30
    assert moved[0] > zoomed[0]
    assert moved[-1] >= zoomed[-1]


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = html(make_facts(), [STEP], TICKET)
    assert not re.findall(r"(?:src|href)=\"(?!data:)|url\(|@import|https?:", text)


def test_a_run_that_diverged_has_a_page() -> None:
    facts = make_facts()
    ranks = [replace(rank, losses=[float("nan"), float("inf")]) for rank in facts.ranks]
    page = html(replace(facts, ranks=ranks, validations=[], distances={}, draw=None), [], None)
    assert "nan" not in page.partition("<table>")[0]


def test_a_long_curve_is_averaged() -> None:
    every = list(range(100_000))
    drawn = line_chart("", "", "", [Curve("a", "red", every, every)], {})
    assert len(drawn) < 40_000
    assert "<script" not in line_chart("<script>", "", "", [Curve("<script>", "red", [0], [0])], {})
