"""The tables of a report, for the terminal and for its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from lightning_axosparse.callbacks.report.facts import (
    LONG,
    RankFacts,
    RunFacts,
    RunResult,
    Work,
    perplexity,
    too_short,
)
from lightning_axosparse.callbacks.ticket_callback import Period

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Section:
    """One table; the first column labels its rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def terminal(tables: Sequence[Section]) -> Group:
    """Return the tables as an object that rich prints."""
    from rich import box
    from rich.console import Group
    from rich.table import Table

    shown = []
    for section in tables:
        table = Table(
            title=section.title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
        for number, column in enumerate(section.columns):
            cells = [column, *(row[number] for row in section.rows)]
            longest = max(len(word) for cell in cells for word in [*cell.split(), ""])
            justify: Literal["left", "right"] = "left" if number == 0 else "right"
            table.add_column(column, justify=justify, min_width=longest)
        for row in section.rows:
            table.add_row(*row)
        shown.append(table)
    return Group(*shown)


def about(facts: RunFacts) -> Section:
    """Return the table of the command, the model, the grid, the seed, the versions and the date."""
    return Section("Run", ("", "value"), list(facts.about.items()))


def headline(facts: RunFacts) -> dict[str, list[str]]:
    """Return what pruning changes, before and after the draw; without empty ones."""
    result, quality = RunResult.of(facts, {}), _quality(facts)
    state = [max(held) for p, held in result.state_bytes.items() if p != "pruning"]
    seconds = [fmean(seconds) for p, seconds in result.step_seconds.items() if p != "pruning"]
    every = {
        "model state of the largest rank": [_bytes(number) for number in state],
        "mean step": [f"{1e3 * mean:.1f} ms" for mean in seconds],
        f"validation {quality.columns[1]}": [
            row[1] for row in quality.rows if row[0].startswith("validation")
        ],
    }
    return {name: values for name, values in every.items() if values}


def sentences(facts: RunFacts) -> list[str]:
    """Say what the draw of the ticket means, and whether the training was too short."""
    found = []
    if facts.draw is not None:
        step = facts.draw.step
        when = "before this training" if step is None else f"after {step} optimizer steps"
        found.append(
            f"The ticket was drawn {when}: from then on the masks are fixed, and "
            f"only {facts.draw.density:.1%} of the entries of pruned weights are stored and sent."
        )
    return [*found, *filter(None, [too_short(facts.tokens_per_parameter)])]


def sections(facts: RunFacts) -> list[Section]:
    """Return the tables of the report in order, without empty ones."""
    tables = [
        _quality(facts),
        _length(facts),
        _ticket(facts),
        _regrid(facts),
        _memory(facts),
        _in_flight(facts),
        _time(facts),
        _densities(facts),
        _channels(facts),
    ]
    return [section for section in tables if section.rows]


def _quality(facts: RunFacts) -> Section:
    validations = {
        "validation, dense, before pruning": facts.dense_validation,
        "validation, at the end": facts.final_validation,
    }
    quality = {data: (each.loss, each.accuracy) for data, each in validations.items() if each}
    if facts.test_loss is not None:
        quality["test, at the end"] = facts.test_loss, facts.test_accuracy
    if any(accuracy is not None for _, accuracy in quality.values()):
        rows = [(data, _percent(a), f"{loss:.4f}") for data, (loss, a) in quality.items()]
        return Section("Quality", ("data", "accuracy", "loss"), rows)
    if not facts.tokens_per_parameter:
        losses = [(data, f"{loss:.4f}") for data, (loss, _) in quality.items()]
        return Section("Quality", ("data", "loss"), losses)
    units = [
        (data, f"{perplexity(loss):.3f}", f"{loss / math.log(2):.3f}", f"{loss:.4f}")
        for data, (loss, _) in quality.items()
    ]
    return Section("Quality", ("text", "perplexity", "bits per byte", "loss"), units)


def _length(facts: RunFacts) -> Section:
    tokens = facts.tokens_per_parameter
    rows = [("tokens per parameter", f"{tokens:.2g}" if tokens < 10 else f"{tokens:.0f}")]
    if too_short(tokens):
        rows.append(("too short to judge quality", f"about {LONG} are needed"))
    return Section("Length of the training", ("", "value"), rows if tokens else [])


def _ticket(facts: RunFacts) -> Section:
    rows = [
        (f"mask distance after {step} optimizer steps", f"{distance:.4f}")
        for step, distance in facts.distances.items()
    ]
    if facts.draw:
        drawn = f"after {facts.draw.step} optimizer steps"
        rows.append(("drawn", "before this training" if facts.draw.step is None else drawn))
        rows.append(("pruning ratio", f"{facts.draw.pruning_ratio:.2f}"))
    elif rows:
        rows.append(("drawn", "never"))
    return Section("Ticket", ("", "value"), rows)


def _regrid(facts: RunFacts) -> Section:
    rows: list[tuple[str, ...]] = []
    if facts.regrid is not None:
        old, new = facts.regrid.old, facts.regrid.new
        rows = [
            ("stages", str(old.g_inter), str(new.g_inter)),
            ("replicas", str(old.g_data), str(new.g_data)),
            (
                "replicas that divide a batch",
                str(old.replicas_per_batch),
                str(new.replicas_per_batch),
            ),
            ("bubble of equal stages", *(f"{bubble:.1%}" for bubble in facts.regrid.bubbles)),
            ("time spent waiting", *(_percent(facts.waiting(p)) for p in ("dense", "sparse"))),
            ("first epoch", "1", str(facts.regrid.epoch + 1)),
            ("seconds of the move", "", f"{facts.regrid.seconds:.2f}"),
        ]
    return Section("Regrid", ("", "before", "after"), rows)


def _memory(facts: RunFacts) -> Section:
    def row(name: str, rank: RankFacts, sizes: dict[Period, int]) -> tuple[str, ...]:
        place = str(rank.rank), str(rank.stage), str(rank.replica)
        return *place, name, *(_bytes(sizes.get(p)) for p in ("dense", "sparse"))

    rows = []
    for rank in facts.ranks:
        state = {period: work.state_bytes for period, work in rank.work.items()}
        reduced = {period: work.reduced_bytes for period, work in rank.work.items()}
        rows += [row("model state", rank, state), row("all-reduced per step", rank, reduced)]
    return Section(
        "Memory and traffic of each rank",
        ("rank", "stage", "replica", "bytes", *_periods(facts)),
        rows,
    )


def _in_flight(facts: RunFacts) -> Section:
    """Return the peak and the limit of each stage; no rows if the limit is one micro-batch."""

    def cell(work: Work | None, stage: int) -> str:
        if work is None or stage not in work.peak_in_flight:
            return ""
        return f"{work.peak_in_flight[stage]} of {work.in_flight}"

    rows = [
        (str(rank.rank), str(stage), *(cell(rank.work.get(p), stage) for p in ("dense", "sparse")))
        for rank in facts.ranks
        for stage in sorted({s for work in rank.work.values() for s in work.peak_in_flight})
        if max(work.in_flight for work in rank.work.values()) > 1
    ]
    return Section(
        "Most micro-batches in flight, and the limit",
        ("rank", "stage", *_periods(facts)),
        rows,
    )


def _time(facts: RunFacts) -> Section:
    parts = list(Work().seconds_per_step())
    rows = [
        (
            str(rank.rank),
            period,
            f"{1e3 * sum(work.seconds_per_step().values()):.1f}",
            *(f"{1e3 * seconds:.1f}" for seconds in work.seconds_per_step().values()),
        )
        for rank in facts.ranks
        for period, work in rank.work.items()
    ]
    return Section("Where a step's time goes (ms)", ("rank", "weights", "step", *parts), rows)


def _densities(facts: RunFacts) -> Section:
    sparsity = facts.draw.sparsity if facts.draw else {}
    rows = [(name, f"{100 * (1 - pruned):.1f} %") for name, pruned in sparsity.items()]
    return Section("Density of each weight", ("weight", "unpruned"), rows)


def _channels(facts: RunFacts) -> Section:
    """Return the channels of each layer; no rows if none were pruned."""
    channels = dict(facts.draw.channels) if facts.draw else {}
    if channels:
        before, after = (sum(counts) for counts in zip(*channels.values(), strict=True))
        channels["all"] = before, after
    rows = [(name, str(before), str(after)) for name, (before, after) in channels.items()]
    return Section("Channels of each layer", ("layer", "before", "after"), rows)


def _periods(facts: RunFacts) -> tuple[str, str]:
    """Return the titles of the columns of the dense and of the sparse period."""
    shrunk = facts.draw is not None and facts.draw.channels
    return ("all channels", "fewer channels") if shrunk else ("dense weights", "sparse weights")


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{fraction:.1%}"


def _bytes(number: int | None) -> str:
    if number is None:
        return ""
    return f"{number / 1e6:,.2f} MB" if number else "0"
