"""Prints the table of the pipeline benchmarks: one row per case and runner, with its bar."""

from __future__ import annotations

WITHIN = 0.05
"""Largest relative error of the simulator."""

COLUMNS = (
    "case",
    "runner",
    "step ms",
    "ratio",
    "bar",
    "reached",
    "simulated ms",
    "measured / simulated",
)


def head() -> None:
    _print(*COLUMNS)
    _print("---", "---", *["--:"] * (len(COLUMNS) - 2))


def row(
    case: str,
    runner: str,
    step: float,
    ratio: float,
    bar: float | None = None,
    simulated: float | None = None,
) -> None:
    """Print a step's seconds, the ratio to the baseline, the bar, and the simulated seconds."""
    bound = ("", "") if bar is None else (f"{bar:.2f}", _verdict(ratio <= bar))
    guess = ("", "")
    if simulated is not None:
        off = step / simulated
        guess = f"{simulated * 1e3:.0f}", f"{off:.3f}, {_verdict(abs(off - 1) <= WITHIN)}"
    _print(case, runner, f"{step * 1e3:.0f}", f"{ratio:.3f}", *bound, *guess)


def _verdict(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _print(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)
