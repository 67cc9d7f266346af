"""The jobs of the study, what decides most first, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.perplexity.arms import Arm, once
from benchmarks.perplexity.job import Job
from benchmarks.perplexity.results import Results
from benchmarks.perplexity.table import Comparison, settled
from benchmarks.perplexity.tasks import (
    ENGLISH,
    LARGER,
    LIBRARY,
    LONG,
    MAIN,
    REPEATED,
    SMALL,
    WIKI,
    Task,
    lasting,
    shaped,
)

CHOOSING = (0, 1, 2)
FRESH = (3, 4, 5)

DENSE = Arm(rate=1.2e-2)
"""Dense at the rate that was best on the first seed."""

BEST = Arm(rate=6e-3)
"""Dense at the rate that is best on three seeds."""

GRADUAL = Arm(rate=6e-3, ratio=0.8, method="gradual", begin=0.25, end=0.9)
"""The recipe."""

CURVED = replace(GRADUAL, score="curvature")
"""The recipe, with another score."""

FROM_HALF = replace(CURVED, ratio=0.5, begin=0.5)
"""Half of the entries, pruned in the second half of the run."""

NINETY = replace(CURVED, ratio=0.9, rate=9e-3)
"""90 %, at its best rate under a cosine."""

AT_THEIR_BEST = (CURVED, FROM_HALF, NINETY)
"""What pruning costs: 80, 50 and 90 %, each at its best rate."""

SIXTH = replace(GRADUAL, rate=9e-3, score="sixth root")

POWERS = tuple(
    replace(SIXTH, score=score)
    for score in ("v^0.17", "v^0.08", "v^0.125", "curvature", "v^0.35", "saliency")
)
"""Scores ``|w| v^p`` by their p; "curvature" has 1/4, "saliency" of the results 1/2."""

EARLY = replace(GRADUAL, begin=0.1)
"""The recipe from a tenth of the run on, of which variants were tried."""


def of(task: Task, *arms: Arm) -> tuple[tuple[Task, Arm], ...]:
    """Return arms with their task."""
    return tuple((task, arm) for arm in arms)


def at_ratios(arm: Arm, *ratios: float) -> tuple[Arm, ...]:
    return tuple(replace(arm, ratio=ratio) for ratio in ratios)


def at_rates(*rates: float) -> tuple[Arm, ...]:
    return tuple(Arm(rate=rate) for rate in rates)


WAYS = (
    GRADUAL,
    EARLY,
    replace(EARLY, score="slow"),
    CURVED,
    replace(EARLY, drop=0.3),
    replace(EARLY, end=0.75),
    replace(EARLY, end=0.75, factor=2.0),
    replace(EARLY, end=0.75, method="through"),
    replace(GRADUAL, every=1 / 64),
    replace(GRADUAL, floor=0.3),
    replace(GRADUAL, decay=0.0),
    replace(GRADUAL, distill=0.5),
    replace(GRADUAL, score="magnitude"),
    replace(GRADUAL, method="rigl", drop=0.3),
    replace(GRADUAL, method="set", drop=0.3),
)
"""Ways to prune 80 % step by step."""

TIMES = (
    replace(GRADUAL, begin=0.1, end=0.75),
    replace(GRADUAL, begin=0.1, end=0.9),
    GRADUAL,
    replace(GRADUAL, begin=0.25, end=0.75),
    replace(GRADUAL, begin=0.5, end=0.95),
    replace(GRADUAL, begin=0.25, end=0.96),
    replace(GRADUAL, begin=0.35, end=0.93),
    replace(GRADUAL, begin=0.35, end=0.93, decay=0.0),
    *(once(0.8, at, 6e-3, factor=1.5) for at in (0.0625, 0.125, 0.25, 0.5, 0.75)),
    *(once(0.8, 0.25, 6e-3, factor=factor, rewarm=warm) for factor, warm in ((1, 0), (2, 0.02))),
)
"""When to prune 80 %."""

SMALLER = tuple(
    pair
    for width, depth in ((64, 1), (48, 1), (36, 2), (28, 4), (32, 1), (24, 2))
    for pair in of(shaped(LIBRARY, width, depth), *at_rates(6e-3, 1.2e-2))
)
"""Dense networks of about the state of the tickets: 80 % the second to fourth, 90 % the last."""


def to_zero(*arms: Arm) -> tuple[Arm, ...]:
    """Return arms whose rate decays linearly to zero."""
    return tuple(replace(arm, final=0.0, shape="linear") for arm in arms)


def by_decay(*rates: float) -> tuple[Arm, ...]:
    """Return dense and pruned arms at some rates, with a cosine first, then with a line to zero."""
    found: tuple[Arm, ...] = ()
    for one in (BEST, CURVED, NINETY):
        arms = tuple(replace(one, rate=rate) for rate in rates)
        found += (*arms, *to_zero(*arms))
    return found


BY_DECAY = by_decay(6e-3, 9e-3, 1.2e-2)
"""Dense, 80 and 90 %, at three rates each, whose decay is a cosine to a tenth or a line to zero."""

RISING = to_zero(
    *(
        replace(one, rate=rate, rise=rise)
        for one in (CURVED, NINETY)
        for rate, rise in ((one.rate, 0.0), (6e-3, 0.25), (9e-3, 0.25), (3e-3, 0.5), (6e-3, 0.5))
    )
)
"""Rates that rise as less is kept: with 0.5 to 2.2 times at 80 %, and to 3.2 times at 90 %."""

HIGHER = to_zero(
    *(replace(arm, rate=1.2e-2) for arm in (BEST, CURVED, NINETY, FROM_HALF)),
    *(replace(arm, rate=2e-2) for arm in (BEST, CURVED, NINETY)),
    *(replace(arm, rate=1.2e-2, rise=0.25) for arm in (CURVED, NINETY)),
)
"""Higher rates with a line to zero, as 1.2e-2 was the best of three for all."""

OTHER_RAMPS = (
    NINETY,
    *(replace(NINETY, end=end) for end in (0.8, 0.75, 0.7)),
    *(replace(NINETY, ramp=ramp) for ramp in (2.0, 5.0)),
    replace(NINETY, row_floor=4),
)
"""Other ends, ramps and floors for 90 %."""

OWN_RATES = tuple(replace(arm, own_rates=power) for arm in (NINETY, CURVED) for power in (0.0, 0.5))

HAM = tuple(
    replace(arm, ham=ham, ham_decay=decay)
    for arm in (NINETY, CURVED, BEST)
    for ham, decay in ((0.0, 0.0), (1.0, 0.0), (10.0, 0.0), (1.0, 0.01))
)
"""HAM's a and b. With a = 1 an entry moves by 1 + |w| times AdamW's step, so 0.1 changes little."""

AVERAGES = (
    *(replace(arm, averaged=decay) for arm in (NINETY, CURVED) for decay in (0.0, 0.99)),
    *(replace(arm, smoothed=0.99) for arm in (NINETY, CURVED)),
    replace(BEST, averaged=0.99, begin=0.9, end=0.9),
)
"""Averages of the weights: of the last tenth of the run, and for the score."""

BLOCKS = tuple(replace(CURVED, rate=rate, block=4) for rate in (6e-3, 9e-3))
"""80 % in blocks of four rows of a column, which a product would load once."""

FASTER = replace(CURVED, rate=9e-3)
"""80 % at the rate that was best on English."""

IN_ENGLISH = (
    BEST,
    replace(BEST, ham=1.0),
    replace(BEST, averaged=0.99, begin=0.9, end=0.9),
    NINETY,
    *(replace(NINETY, end=end) for end in (0.8, 0.7)),
    *(replace(NINETY, ramp=ramp) for ramp in (2.0, 5.0)),
    replace(NINETY, row_floor=4),
    *(replace(arm, own_rates=0.5) for arm in (NINETY, FASTER)),
    *(replace(arm, ham=1.0) for arm in (NINETY, FASTER)),
    *(replace(arm, averaged=0.99) for arm in (NINETY, FASTER)),
    *(replace(arm, smoothed=0.99) for arm in (NINETY, FASTER)),
    FASTER,
    replace(FASTER, block=4),
)
"""Arms B to E, and blocks, on English."""

WIDE = shaped(lasting(LIBRARY, 1088), 256, 2)
"""A wide network of which few weights are left: 1 % of it has seen 67 bytes a weight."""

EARLIER = replace(CURVED, ratio=0.99, rate=1e-3, begin=0.05, end=0.5, rise=0.5)
"""The times and rates of Gao et al. (arXiv 2511.13653): pruned in the first half of the run."""

LINEAR = replace(EARLIER, ramp=1.0)
FLOORED = replace(LINEAR, row_floor=2)
RETURNING = replace(FLOORED, method="returning", score=Arm.score, every=0.0, floor=1.0)
"""Their way, by magnitude within each weight; it has no score."""

EXTREME = to_zero(
    *at_rates(1.5e-3, 3e-3, 6e-3),
    *(replace(EARLIER, rate=rate) for rate in (1e-3, 2e-3)),
    replace(EARLIER, begin=0.25, end=0.9),
    *(replace(LINEAR, rate=rate) for rate in (1e-3, 2e-3)),
    FLOORED,
    replace(FLOORED, score="magnitude", floor=1.0),
    *(replace(RETURNING, rate=rate) for rate in (3e-4, 1e-3, 2e-3)),
    *(
        replace(RETURNING, rate=rate, end=0.9, ramp=3.0, rise=0.0, row_floor=0)
        for rate in (3e-3, 6e-3)
    ),
    *(replace(CURVED, ratio=0.99, rate=rate) for rate in (1.5e-3, 3e-3, 6e-3, 1.2e-2)),
    replace(EARLIER, rate=2e-3, drop=0.3),
)
"""Ways to leave one weight in a hundred."""

WIDER = of(
    shaped(lasting(LIBRARY, 1088), 512, 2),
    *to_zero(
        *at_rates(7.5e-4, 1.5e-3),
        *(replace(EARLIER, rate=rate) for rate in (1e-3, 2e-3)),
    ),
)
"""Twice as wide, dense and with one weight in a hundred."""

SMALL_RATES = to_zero(*at_rates(6e-3, 1.2e-2, 2.4e-2))

FEW = of(WIDE, *to_zero(*at_rates(1.5e-3))) + tuple(
    pair
    for ratio, width in ((0.98, 32), (0.99, 20), (0.999, 4))
    for pair in (
        *of(WIDE, *to_zero(*(replace(EARLIER, ratio=ratio, rate=r) for r in (1e-3, 2e-3)))),
        *of(shaped(lasting(LIBRARY, 1088), width, 2), *SMALL_RATES),
    )
)
"""One weight in 50 to 1000 is left, and dense networks of about as many weights."""

PHASES: dict[str, tuple[Comparison, ...]] = {
    "rates": (
        Comparison(
            "Dense, by its rate",
            of(LIBRARY, DENSE, *at_rates(3e-3, 6e-3, 2e-2)),
            CHOOSING[:1],
            "validation",
        ),
        Comparison(
            "The recipe, by its rate",
            of(LIBRARY, GRADUAL, *(replace(GRADUAL, rate=rate) for rate in (3e-3, 9e-3, 1.2e-2))),
            CHOOSING[:1],
            "validation",
        ),
    ),
    "decay": (
        Comparison(
            "Weight decay",
            of(
                LIBRARY,
                *(
                    replace(arm, weight_decay=d)
                    for arm in (DENSE, GRADUAL)
                    for d in (0.1, 0.0, 0.3)
                ),
            ),
            CHOOSING[:1],
            "validation",
        ),
    ),
    "report": (
        Comparison("What pruning costs", of(LIBRARY, BEST, *AT_THEIR_BEST), FRESH, "test"),
        Comparison(
            "Rates and times, on the seeds that choose",
            of(
                LIBRARY,
                BEST,
                replace(BEST, rate=9e-3),
                DENSE,
                CURVED,
                replace(CURVED, rate=9e-3),
                replace(CURVED, begin=0.5),
                replace(FROM_HALF, begin=0.25),
                FROM_HALF,
                replace(FROM_HALF, begin=0.6, end=0.95),
                replace(CURVED, ratio=0.9),
                replace(CURVED, ratio=0.9, rate=9e-3),
                replace(CURVED, ratio=0.9, rate=9e-3, begin=0.15),
            ),
            CHOOSING,
            "validation",
        ),
        Comparison(
            "All pruned at the same times, at one rate",
            of(LIBRARY, BEST, *at_ratios(CURVED, 0.8, 0.5, 0.9)),
            FRESH,
            "test",
        ),
    ),
    "root": (
        Comparison(
            "What pruning costs, scored by saliency",
            of(LIBRARY, BEST, *at_ratios(GRADUAL, 0.8, 0.5, 0.9)),
            FRESH,
            "test",
        ),
    ),
    "powers": (
        Comparison("Powers of v", of(LIBRARY, *POWERS), CHOOSING, "validation"),
        *(
            Comparison(
                f"Powers of v, {ratio:.0%}",
                of(
                    LIBRARY,
                    *(
                        replace(CURVED, ratio=ratio, rate=rate, score=score)
                        for rate in (6e-3, 9e-3)
                        for score in ("curvature", "v^(3/16)", "sixth root")
                    ),
                ),
                FRESH,
                "test",
            )
            for ratio in (0.5, 0.8, 0.9)
        ),
    ),
    "seconds": (
        Comparison(
            "At equal seconds",
            of(LIBRARY, BEST)
            + of(lasting(LIBRARY, 5344), CURVED)
            + of(lasting(LIBRARY, 5984), replace(CURVED, ratio=0.9)),
            FRESH,
            "test",
        ),
    ),
    "tuned": (
        Comparison(
            "The recipe scored by curvature, by its rate and times",
            of(
                LIBRARY,
                DENSE,
                CURVED,
                replace(CURVED, rate=9e-3),
                replace(CURVED, rate=1.2e-2),
                replace(CURVED, rate=9e-3, begin=0.35, end=0.93),
                replace(CURVED, rate=9e-3, begin=0.1),
                replace(CURVED, rate=9e-3, decay=0.0),
            ),
            CHOOSING[:1],
            "validation",
        ),
        Comparison(
            "The recipe without weight decay from the first pruning on, on a fresh seed",
            of(
                LIBRARY,
                DENSE,
                *(
                    arm
                    for ratio in (0.8, 0.5)
                    for arm in (
                        replace(CURVED, ratio=ratio),
                        replace(CURVED, ratio=ratio, rate=9e-3, decay=0.0),
                    )
                ),
            ),
            FRESH[:1],
            "test",
        ),
    ),
    "ratios": (
        Comparison(
            "Ratios",
            of(LIBRARY, DENSE, *at_ratios(GRADUAL, 0.5, 0.8, 0.9)),
            CHOOSING[:1],
            "validation",
        ),
    ),
    "repeated": (
        Comparison(
            "Thirty-two epochs of little text",
            of(
                REPEATED,
                *(Arm(rate=6e-3, dropout=dropout) for dropout in (0.1, 0.0, 0.05, 0.2, 0.3)),
                *(
                    replace(GRADUAL, ratio=ratio, dropout=dropout)
                    for dropout in (0.1, 0.05, 0.0)
                    for ratio in (0.5, 0.8)
                ),
                *(
                    replace(arm, dropout=0.1, weight_decay=0.3)
                    for arm in (Arm(rate=6e-3), replace(GRADUAL, ratio=0.5), GRADUAL)
                ),
                *(
                    replace(CURVED, ratio=ratio, dropout=dropout)
                    for dropout in (0.05, 0.1, 0.0)
                    for ratio in (0.8, 0.5)
                ),
                Arm(rate=3e-3, dropout=0.1),
                Arm(rate=9e-3, dropout=0.1),
                replace(CURVED, rate=9e-3, dropout=0.05),
                replace(CURVED, ratio=0.5, rate=9e-3, dropout=0.1),
                replace(CURVED, ratio=0.5, rate=9e-3, dropout=0.05),
                replace(CURVED, rate=1.2e-2, dropout=0.05),
                Arm(rate=1.2e-2, dropout=0.1),
                replace(FROM_HALF, rate=9e-3, dropout=0.1),
                replace(FROM_HALF, rate=9e-3, dropout=0.05),
            ),
            CHOOSING[:1],
            "validation",
        ),
    ),
    "times": (Comparison("When to prune", of(LIBRARY, DENSE, *TIMES), CHOOSING[:1], "validation"),),
    "ways": (
        Comparison("Ways to prune 80 %", of(LIBRARY, DENSE, *WAYS), CHOOSING[:1], "validation"),
    ),
    "bytes": (
        Comparison(
            "Dense networks of as few bytes",
            of(LIBRARY, *at_ratios(GRADUAL, 0.8, 0.9)) + SMALLER,
            CHOOSING[:1],
            "validation",
        ),
    ),
    "english": (
        Comparison(
            "English, by rate and score",
            of(
                ENGLISH,
                *at_rates(6e-3, 3e-3, 9e-3, 1.2e-2),
                *(replace(arm, rate=rate) for rate in (6e-3, 9e-3) for arm in (CURVED, GRADUAL)),
                replace(CURVED, rate=1.2e-2),
                FROM_HALF,
                replace(FROM_HALF, rate=9e-3),
            ),
            CHOOSING[:1],
            "validation",
        ),
        Comparison(
            "English",
            of(
                ENGLISH,
                BEST,
                *at_ratios(replace(CURVED, rate=9e-3), 0.8, 0.5, 0.9),
                FROM_HALF,
            ),
            FRESH,
            "test",
        ),
    ),
    "rates-to-zero": (
        Comparison(
            "Rates that decay to a tenth and to zero",
            of(LIBRARY, *BY_DECAY),
            CHOOSING,
            "validation",
        ),
    ),
    "rising-rates": (
        Comparison(
            "Rates that decay to zero, and rise as less is kept",
            of(LIBRARY, *to_zero(BEST), *RISING),
            CHOOSING,
            "validation",
        ),
    ),
    "higher-rates": (
        Comparison(
            "Higher rates that decay to zero",
            of(LIBRARY, *HIGHER),
            CHOOSING,
            "validation",
        ),
    ),
    "zero-report": (
        Comparison(
            "What pruning costs with rates that decay to zero",
            of(LIBRARY, *HIGHER[:4]),
            FRESH,
            "test",
        ),
    ),
    "zero-report-english": (
        Comparison(
            "English, rates that decay to zero",
            of(ENGLISH, *to_zero(BEST, CURVED, replace(NINETY, rate=9e-3), FROM_HALF)),
            FRESH,
            "test",
        ),
    ),
    "zero-report-larger": (
        Comparison(
            ".8 M parameters, rates that decay to zero",
            of(
                LARGER,
                *to_zero(*(replace(a, rate=6e-3) for a in (BEST, CURVED, NINETY, FROM_HALF))),
            ),
            FRESH,
            "test",
        ),
    ),
    "ramps": (
        Comparison(
            "90 %, by end, ramp and floor of rows",
            of(LIBRARY, BEST, *OTHER_RAMPS),
            CHOOSING,
            "validation",
        ),
    ),
    "own-rates": (
        Comparison(
            "A rate for each weight",
            of(LIBRARY, BEST, *OWN_RATES),
            CHOOSING,
            "validation",
        ),
    ),
    "blocks": (
        Comparison(
            "80 % in blocks of 4x1, and 90 % of single entries",
            of(LIBRARY, BEST, CURVED, *BLOCKS, NINETY),
            CHOOSING,
            "validation",
        ),
    ),
    "extreme": (
        Comparison("Ways to prune 99 %", of(WIDE, *EXTREME), CHOOSING[:1], "validation"),
        Comparison("98 to 99.9 %, and as small dense ones", FEW, CHOOSING[:1], "validation"),
    ),
    "extreme-wider": (Comparison("99 %, 512 wide", WIDER, CHOOSING[:1], "validation"),),
    "ham": (Comparison("HAM", of(LIBRARY, BEST, *HAM), CHOOSING, "validation"),),
    "averages": (
        Comparison("Averaged weights", of(LIBRARY, BEST, *AVERAGES), CHOOSING, "validation"),
    ),
    "to-zero-english": (
        Comparison(
            "English, rates that decay to a tenth and to zero",
            of(ENGLISH, *by_decay(6e-3, 9e-3)),
            CHOOSING,
            "validation",
        ),
    ),
    "arms-english": (
        Comparison("English, arms B to E", of(ENGLISH, *IN_ENGLISH), CHOOSING[:1], "validation"),
    ),
    "larger": (
        Comparison(
            ".8 M parameters, rates",
            of(
                LARGER,
                *at_rates(3e-3, 2e-3, 6e-3, 1.2e-2),
                *(replace(CURVED, rate=rate) for rate in (3e-3, 6e-3, 1.2e-2)),
            ),
            CHOOSING[:1],
            "validation",
        ),
        Comparison(
            ".8 M parameters",
            of(
                LARGER,
                *at_rates(3e-3),
                *at_ratios(replace(CURVED, rate=3e-3), 0.8, 0.5, 0.9),
                replace(FROM_HALF, rate=3e-3),
            ),
            FRESH,
            "test",
        ),
    ),
}
"""By name, in the order of what decides most."""

SHORT = tuple(
    Comparison(
        task.name,
        of(
            task,
            *([] if task is WIKI else [Arm()]),
            Arm(factor=2.0),
            *(
                once(ratio, factor=2.0, entries=entries)
                for ratio in ((0.8, 0.5, 0.9) if task is SMALL else (0.8,))
                for entries in ("score", "random")
            ),
        ),
        FRESH,
        "test",
    )
    for task in (MAIN, SMALL, WIKI, LONG)
)
"""Tasks of .2 to 2 tokens per parameter; together they are one table."""

HEAD = 2
"""The lines above the rows of a table."""


def jobs(phase: str) -> Iterator[Job]:
    """Yield the jobs of a phase; some stand in two tables."""
    for comparison in PHASES[phase]:
        yield from comparison.jobs


def tables(results: Results) -> str:
    """Return all tables as far as their jobs were finished, in Markdown."""
    lines = results.lines()
    blocks = []
    for each in (each for phase in PHASES.values() for each in phase):
        rows = each.rows(lines)
        if len(rows) > HEAD:
            blocks.append("\n".join([f"{each.title} (by {each.key}):", "", *rows]))
    short = [each.rows(lines) for each in SHORT]
    joined = [*short[0][:HEAD], *(row for rows in short for row in rows[HEAD:])]
    blocks.append("\n".join(["Far from the end of training (by test):", "", *joined]))
    return "\n\n".join([*blocks, "\n".join(["When masks settle:", "", *settled(lines)])])
