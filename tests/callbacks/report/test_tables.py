from __future__ import annotations

import io
import math
from dataclasses import replace

from rich.console import Console

from lightning_axosparse.callbacks.report.facts import RunFacts, TicketDraw
from lightning_axosparse.callbacks.report.tables import (
    headline,
    sections,
    sentences,
    terminal,
)
from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.strategy.regrid import Regridded
from tests.callbacks.report.runs import make_work


def rows(facts: RunFacts, title: str) -> list[tuple[str, ...]]:
    return next([tuple(r) for r in s.rows] for s in sections(facts) if s.title.startswith(title))


def test_quality_is_dense_at_the_draw_then_final_then_test(facts):
    assert rows(facts, "Quality") == [
        (
            "validation, dense, before pruning",
            f"{math.e**2:.3f}",
            f"{2 / math.log(2):.3f}",
            "2.0000",
        ),
        ("validation, at the end", f"{math.e:.3f}", f"{1 / math.log(2):.3f}", "1.0000"),
        ("test, at the end", f"{math.e**1.5:.3f}", f"{1.5 / math.log(2):.3f}", "1.5000"),
    ]


def test_a_training_on_other_data_than_text_has_losses_alone(facts):
    facts.ranks[0].tokens = 0
    assert rows(facts, "Quality") == [
        ("validation, dense, before pruning", "2.0000"),
        ("validation, at the end", "1.0000"),
        ("test, at the end", "1.5000"),
    ]
    assert headline(facts)["validation loss"] == ["2.0000", "1.0000"]
    assert sections(facts)[0].columns == ("data", "loss")


def test_memory_and_traffic_before_and_after(facts):
    assert rows(facts, "Memory")[6:] == [
        ("3", "1", "1", "model state", "32.00 MB", "32.00 MB"),
        ("3", "1", "1", "all-reduced per step", "4.00 MB", "2.00 MB"),
    ]


def test_the_limit_and_the_peaks_of_every_stage(facts):
    assert not any("in flight" in section.title for section in sections(facts))
    for rank in facts.ranks[:2]:
        rank.work["dense"] = replace(make_work(1), in_flight=2, peak_in_flight={rank.stage: 2})
        rank.work["sparse"] = replace(make_work(1), in_flight=4, peak_in_flight={rank.stage: 3})
    del facts.ranks[1].work["sparse"]
    assert rows(facts, "Most micro") == [("0", "0", "2 of 2", "3 of 4"), ("1", "1", "2 of 2", "")]


def test_ticket_and_sparsity(facts):
    assert ("mask distance after 2 optimizer steps", "0.0500") in rows(facts, "Ticket")
    assert ("drawn", "after 1 optimizer steps") in rows(facts, "Ticket")
    assert rows(facts, "Density") == [("model.0.weight", "25.0 %"), ("model.1.weight", "15.0 %")]


def test_channels_and_accuracies_of_a_network_that_was_shrunk(facts):
    channels = {"model.1": (8, 3), "model.4": (12, 12)}
    facts.draw = TicketDraw(0.5, {}, 0.5, step=1, channels=channels)
    facts.validations = [replace(v, accuracy=0.9 + v.epoch / 20) for v in facts.validations]
    facts.test_accuracy = 0.925
    assert rows(facts, "Channels") == [
        ("model.1", "8", "3"),
        ("model.4", "12", "12"),
        ("all", "20", "15"),
    ]
    assert rows(facts, "Quality") == [
        ("validation, dense, before pruning", "90.0%", "2.0000"),
        ("validation, at the end", "95.0%", "1.0000"),
        ("test, at the end", "92.5%", "1.5000"),
    ]
    titles = {section.title: section.columns for section in sections(facts)}
    assert "Density of each weight" not in titles
    memory = titles["Memory and traffic of each rank"]
    assert memory[-2:] == ("all channels", "fewer channels")


def test_a_run_without_a_ticket_has_no_section_on_it(facts):
    dense = replace(facts, draw=None, distances={}, test_loss=None)
    titles = [section.title for section in sections(dense)]
    assert titles == [
        "Quality",
        "Length of the training",
        "Memory and traffic of each rank",
        "Where a step's time goes (ms)",
    ]
    assert rows(dense, "Quality")[0][0] == "validation, at the end"


def test_terminal_shows_every_cell_on_80_columns(facts):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(sections(facts)))
    shown = console.export_text()
    assert "…" not in shown
    for section in sections(facts):
        assert section.title in shown
    assert "model.1.weight" in shown


def test_a_move_to_shorter_pipelines_is_shown(facts):
    assert not [section for section in sections(facts) if section.title == "Regrid"]
    old = Grid(4, 4)
    facts.regrid = Regridded(old, old.shortened(2), epoch=2, seconds=0.25, microbatches=16)
    facts.ranks[0].work["sparse"].activities["wait"] = 0.3
    assert rows(facts, "Regrid") == [
        ("stages", "4", "2"),
        ("replicas", "1", "2"),
        ("replicas that divide a batch", "1", "2"),
        ("bubble of equal stages", "15.8%", "11.1%"),
        ("time spent waiting", "10.0%", "15.0%"),
        ("first epoch", "1", "3"),
        ("seconds of the move", "", "0.25"),
    ]


def test_a_short_training_shows_nothing_of_quality(facts):
    facts.parameters, facts.ranks[0].tokens = 1000, 0
    assert not any(section.title.startswith("Length") for section in sections(facts))
    facts.ranks[0].tokens, facts.ranks[2].tokens = 100, 90.5
    assert rows(facts, "Length") == [
        ("tokens per parameter", "0.19"),
        ("too short to judge quality", "about 20 are needed"),
    ]
    sentence = "Too short to judge quality: 0.19 tokens per parameter, about 20 are needed."
    assert sentences(facts)[1:] == [sentence]
    facts.ranks[0].tokens = 20_000
    assert rows(facts, "Length") == [("tokens per parameter", "20")]
    assert len(sentences(facts)) == 1


def test_the_headline_has_what_pruning_changes(facts):
    facts.ranks[3].work["sparse"].state["weights"] = 1_000_000
    facts.ranks[2].work["sparse"].state["weights"] = 9_000_000
    assert headline(facts) == {
        "model state of the largest rank": ["32.00 MB", "33.00 MB"],
        "mean step": ["200.0 ms", "100.0 ms"],
        "validation perplexity": [f"{math.e**2:.3f}", f"{math.e:.3f}"],
    }
    [drawn] = sentences(facts)
    assert drawn.startswith("The ticket was drawn after 1 optimizer steps: ")
    assert "20.0% of the entries" in drawn
    dense = replace(facts, draw=None, validations=[])
    for rank in dense.ranks:
        del rank.work["sparse"]
    expected = {"model state of the largest rank": ["32.00 MB"], "mean step": ["200.0 ms"]}
    assert headline(dense) == expected
    assert sentences(dense) == []
