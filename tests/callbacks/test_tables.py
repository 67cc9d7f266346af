from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_axosparse.callbacks.facts import Draw, RankFacts, RunFacts, Validation, Work
from lightning_axosparse.callbacks.gantt import Placed, RecordedStep
from lightning_axosparse.callbacks.pictures import draw_pictures
from lightning_axosparse.callbacks.tables import markdown, sections, terminal
from lightning_axosparse.grid import Grid
from lightning_axosparse.regrid import Regridded
from lightning_axosparse.timing import Span


def work(scale: float) -> Work:
    return Work(
        steps=10,
        seconds=2.0 * scale,
        activities={
            "forward": 0.5 * scale,
            "backward": 0.8 * scale,
            "wait": 0.2 * scale,
            "optimizer": 0.1 * scale,
            "densify": 0.05 * scale,
            "compress": 0.05 * scale,
        },
        state={"weights": 8_000_000, "indices": 0, "gradients": 8_000_000, "optimizer": 16_000_000},
        reduced_bytes=int(4_000_000 * scale),
    )


@pytest.fixture
def facts() -> RunFacts:
    ranks = [
        RankFacts(rank, rank % 2, rank // 2, {"dense": work(1), "sparse": work(0.5)}, losses)
        for rank, losses in enumerate([[3.0, 2.0], [3.0, 2.0], [5.0, 4.0], [5.0, 4.0]])
    ]
    return RunFacts(
        ranks,
        steps=[1, 2],
        validations=[Validation(0, 1, 2.0, "dense"), Validation(1, 2, 1.0, "sparse")],
        distances={1: 0.4, 2: 0.05},
        threshold=0.1,
        draw=Draw(0.8, {"model.0.weight": 0.75, "model.1.weight": 0.85}, epochs=1, step=1),
        test_loss=1.5,
    )


def rows(facts: RunFacts, title: str) -> list[tuple[str, ...]]:
    return next([tuple(r) for r in s.rows] for s in sections(facts) if s.title.startswith(title))


def test_a_step_divides_into_its_whole_time():
    shares = work(1).shares()
    assert sum(shares.values()) == pytest.approx(0.2)
    assert shares == pytest.approx(
        {
            "compute": 0.12,
            "waiting": 0.02,
            "all-reduce": 0.0,
            "optimizer": 0.01,
            "densify, compress": 0.01,
            "other": 0.04,
        }
    )


def test_loss_is_the_mean_over_replicas(facts):
    assert facts.losses == [4.0, 3.0]


def test_quality_is_dense_at_the_draw_then_final_then_test(facts):
    assert rows(facts, "Quality") == [
        ("validation, dense, at the draw", f"{math.e**2:.3f}", f"{2 / math.log(2):.3f}", "2.0000"),
        ("validation, at the end", f"{math.e:.3f}", f"{1 / math.log(2):.3f}", "1.0000"),
        ("test, at the end", f"{math.e**1.5:.3f}", f"{1.5 / math.log(2):.3f}", "1.5000"),
    ]


def test_memory_and_traffic_before_and_after(facts):
    assert rows(facts, "Memory")[6:] == [
        ("3", "1", "1", "model state", "32.00 MB", "32.00 MB"),
        ("3", "1", "1", "all-reduced per step", "4.00 MB", "2.00 MB"),
    ]


def test_one_replica_all_reduces_plainly_nothing(facts):
    facts.ranks[0].work["dense"].reduced_bytes = 0
    assert rows(facts, "Memory")[1] == ("0", "0", "0", "all-reduced per step", "0", "2.00 MB")


def test_the_limit_and_the_peaks_of_every_stage(facts):
    assert not any("in flight" in section.title for section in sections(facts))
    for rank in facts.ranks[:2]:
        rank.work["dense"] = replace(work(1), in_flight=2, peak_in_flight={rank.stage: 2})
        rank.work["sparse"] = replace(work(1), in_flight=4, peak_in_flight={rank.stage: 3})
    del facts.ranks[1].work["sparse"]
    assert rows(facts, "Most micro") == [("0", "0", "2 of 2", "3 of 4"), ("1", "1", "2 of 2", "")]


def test_time_of_each_rank_and_period(facts):
    times = rows(facts, "Where")
    assert len(times) == 8
    assert times[0] == ("0", "dense", "200.0", "120.0", "20.0", "0.0", "10.0", "10.0", "40.0")


def test_ticket_and_sparsity(facts):
    assert ("mask distance after 2 epochs", "0.0500") in rows(facts, "Early-bird")
    assert ("drawn", "after 1 epochs, 1 optimizer steps") in rows(facts, "Early-bird")
    assert rows(facts, "Sparsity") == [("model.0.weight", "75.0 %"), ("model.1.weight", "85.0 %")]


def test_a_run_without_a_ticket_says_nothing_of_one(facts):
    dense = replace(facts, draw=None, distances={}, test_loss=None)
    titles = [section.title for section in sections(dense)]
    assert titles == ["Quality", "Memory and traffic of each rank", "Where a step's time goes (ms)"]
    assert rows(dense, "Quality")[0][0] == "validation, at the end"


def test_an_adopted_ticket_was_drawn_before(facts, tmp_path):
    facts.draw = Draw(0.8, {"model.0.weight": 0.8})
    assert ("drawn", "before this training") in rows(facts, "Early-bird")
    assert "loss.png" in draw_pictures(facts, [], tmp_path)


def test_a_search_that_never_drew_says_so(facts):
    assert rows(replace(facts, draw=None), "Early-bird")[-1] == ("drawn", "never")


def test_markdown_holds_every_section_as_a_table_and_every_picture(facts):
    text = markdown(facts, ["loss.png"])
    for section in sections(facts):
        assert f"## {section.title}" in text
        for row in section.rows:
            assert "| " + " | ".join(row) + " |" in text
    assert text.endswith("![loss.png](loss.png)\n")


def test_terminal_shows_every_cell_on_80_columns(facts):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(facts))
    shown = console.export_text()
    assert "…" not in shown
    for section in sections(facts):
        assert section.title in shown
    assert "model.1.weight" in shown


def test_json_holds_what_follows_from_the_facts(facts, tmp_path):
    facts.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["dense_at_draw"]["perplexity"] == pytest.approx(math.e**2)
    assert content["final"]["bits_per_byte"] == pytest.approx(1 / math.log(2))
    assert content["test"]["loss"] == 1.5
    assert content["losses"] == [4.0, 3.0]
    assert content["draw"]["sparsity"] == {"model.0.weight": 0.75, "model.1.weight": 0.85}
    sparse = content["ranks"][1]["work"]["sparse"]
    assert sparse["seconds_per_step"]["compute"] == pytest.approx(0.06)
    assert sparse["state"]["optimizer"] == 16_000_000


def test_pictures(facts, tmp_path):
    step = RecordedStep(0, 1, "dense", [Placed(0, Span("forward", 0, 1, 0, 0))])
    drawn = draw_pictures(facts, [step, step], tmp_path)
    assert drawn == ["loss.png", "mask_distance.png", "gantt.png"]
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    dense = replace(facts, draw=None, distances={})
    assert draw_pictures(dense, [], tmp_path) == ["loss.png"]


def test_a_move_to_shorter_pipelines_is_shown(facts: RunFacts, tmp_path):
    assert not [section for section in sections(facts) if section.title == "Regrid"]
    old = Grid(4, 4)
    facts.regrid = Regridded(old, old.shortened(2), epoch=2, seconds=0.25, microbatches=16)
    facts.ranks[0].work["sparse"].activities["wait"] = 0.3
    assert rows(facts, "Regrid") == [
        ("stages", "4", "2"),
        ("replicas", "1", "2"),
        ("replicas that share a batch", "1", "2"),
        ("bubble of equal stages", "15.8%", "11.1%"),
        ("time spent waiting", "10.0%", "15.0%"),
        ("first epoch", "1", "3"),
        ("seconds of the move", "", "0.25"),
    ]
    facts.save(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())["regrid"]
    assert (saved["old"]["g_inter"], saved["new"]["g_inter"]) == (4, 2)
    assert saved["bubbles"] == pytest.approx([3 / 19, 1 / 9])
