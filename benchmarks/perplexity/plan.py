"""The jobs of the study: what chooses settings, what shows them on other seeds, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.perplexity.arms import Dense, Pruned
from benchmarks.perplexity.job import Arm, Job
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.settling import Settling
from benchmarks.perplexity.table import compare, settled
from benchmarks.perplexity.tasks import (
    AS_LARGE,
    AS_LARGE_PRUNED,
    DEEP,
    LONG,
    MAIN,
    QUICK,
    SMALL,
    WIKI,
    Task,
    shaped,
)

CHOOSING = (0, 1, 2)
FRESH = (3, 4, 5)

TICKET = Pruned()
CONTROL = Dense(TICKET.factor, TICKET.draw_after)
DENSE = Dense()

ANY = replace(TICKET, entries="random")
SAME_RATE = replace(ANY, factor=1.0)

MASKS: tuple[Arm, ...] = (replace(TICKET, masks="random"), replace(TICKET, masks="initial"))
DRAWS: tuple[Arm, ...] = tuple(
    replace(TICKET, draw_after=share, draw_by=share) for share in (0.0625, 0.125, 0.25, 0.375, 0.5)
)
RATIOS: tuple[Arm, ...] = tuple(
    replace(arm, ratio=ratio) for ratio in (0.9, 0.5) for arm in (TICKET, ANY)
)

AT_A_QUARTER = replace(TICKET, draw_by=0.25)
ENTRIES = ("random", "score", "magnitude", "even", "lots")
FACTORS = (2.0, 1.5, 1.0)


def choices(
    entries: tuple[str, ...], floors: tuple[float, ...], factors: tuple[float, ...]
) -> tuple[Arm, ...]:
    """Return tickets by their entries, floor and rate, and the dense arms of these rates."""
    tickets = (
        replace(AT_A_QUARTER, entries=each, floor=floor, factor=factor)
        for each in entries
        for floor in floors
        for factor in factors
    )
    return (*tickets, *(Dense(factor, TICKET.draw_after) for factor in factors))


VARIANTS: tuple[Arm, ...] = (
    replace(AT_A_QUARTER, floor=0.0),
    replace(AT_A_QUARTER, floor=0.01),
    replace(AT_A_QUARTER, factor=3.0),
    replace(AT_A_QUARTER, entries="random", scope="erk"),
    replace(AT_A_QUARTER, entries="random", floor=0.6),
    replace(AT_A_QUARTER, entries="random", dense=("embedding",)),
)
"""Variants of one setting or two, tried on seeds that report nothing else."""

FLOORS: tuple[Arm, ...] = tuple(
    replace(AT_A_QUARTER, entries=entries, floor=floor)
    for entries in ("score", "random")
    for floor in (0.0, 0.01, 0.05, 0.3)
)


def at_ratio(ratio: float) -> tuple[Arm, ...]:
    """Return tickets that prune a fraction, by their entries."""
    return tuple(
        replace(AT_A_QUARTER, ratio=ratio, entries=entries) for entries in ("score", "random")
    )


METHODS: tuple[Arm, ...] = (
    replace(TICKET, method="gradual", draw_after=0.125, draw_by=0.5),
    replace(TICKET, method="set", draw_by=0.75),
    replace(TICKET, method="rigl", draw_by=0.75),
    replace(TICKET, pattern="4x1"),
    replace(TICKET, pattern="2:4", ratio=0.5),
)


@dataclass(frozen=True)
class Comparison:
    """A table: arms of a task on some seeds.

    Attributes:
        task: the task.
        arms: the arms; dense ones that they are compared with among them.
        seeds: of each arm.
        key: by which number arms are compared: "validation" chooses, "test" reports.
    """

    task: Task
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    key: str


PHASES: dict[str, tuple[Comparison, ...]] = {
    "choose": (
        Comparison(SMALL, choices(ENTRIES, (0.05,), (2.0,)), CHOOSING, "validation"),
        Comparison(MAIN, choices(ENTRIES[:3], (0.05,), FACTORS), CHOOSING[:1], "validation"),
        Comparison(LONG, choices(ENTRIES[:2], (0.05,), FACTORS[:1]), CHOOSING[:1], "validation"),
        Comparison(SMALL, choices(ENTRIES[:2], (0.05, 0.3), FACTORS), CHOOSING[:1], "validation"),
        Comparison(SMALL, (DENSE, CONTROL, *VARIANTS), CHOOSING[:1], "validation"),
    ),
    "floors": tuple(
        Comparison(task, (DENSE, CONTROL, *FLOORS), CHOOSING[:1], "validation")
        for task in (SMALL, *DEEP)
    ),
    "bytes": (
        *(Comparison(task, (DENSE, CONTROL), CHOOSING[:1], "validation") for task in AS_LARGE),
        *(
            Comparison(task, (CONTROL, *at_ratio(ratio)), CHOOSING[:1], "validation")
            for task, ratio in {SMALL: TICKET.ratio, **AS_LARGE_PRUNED}.items()
        ),
    ),
    "equal": (
        Comparison(shaped(112, 1), (CONTROL,), FRESH, "test"),
        Comparison(shaped(128, 2), (CONTROL, *at_ratio(0.61)), FRESH, "test"),
    ),
    "methods": (Comparison(SMALL, (DENSE, CONTROL, *METHODS), CHOOSING, "validation"),),
    "draw": (Comparison(QUICK, (DENSE, CONTROL, *DRAWS), (0, 1), "validation"),),
    "show": (
        Comparison(MAIN, (ANY, SAME_RATE, TICKET, DENSE, CONTROL), FRESH, "test"),
        Comparison(SMALL, (ANY, TICKET, CONTROL, *MASKS[:1]), FRESH, "test"),
        Comparison(WIKI, (ANY, TICKET, CONTROL), FRESH, "test"),
        Comparison(SMALL, (ANY, TICKET, CONTROL, *RATIOS, *MASKS, DENSE), FRESH, "test"),
        Comparison(LONG, (ANY, TICKET, CONTROL, DENSE), FRESH, "test"),
    ),
}


SETTLING = tuple(
    Job(replace(QUICK, learning_rate=rate), Settling(), 0) for rate in (1.5e-3, 3e-3, 6e-3)
)


def jobs(phase: str) -> Iterator[Job]:
    """Yield the jobs of a phase, table by table and seed by seed; some stand in two tables."""
    if phase == "settle":
        yield from SETTLING
        return
    for each in PHASES[phase]:
        for seed in each.seeds:
            for arm in each.arms:
                yield Job(each.task, arm, seed)


def tables(results: Results) -> str:
    """Return all tables as far as their jobs were finished, in Markdown."""
    blocks = []
    for phase, comparisons in PHASES.items():
        for each in comparisons:
            rows = compare(results, each.task, each.arms, each.seeds, each.key)
            title = f"{phase}: {each.task.name}, compared by {each.key} perplexity"
            blocks.append("\n".join([title, "", *rows]))
    blocks.append("\n".join(["settle: QUICK, settled at", "", *settled(results, SETTLING)]))
    return "\n\n".join(blocks)
