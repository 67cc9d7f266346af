"""The table of the pipeline benchmarks: a row a case and runner, with the bar it has to reach."""

from __future__ import annotations

WITHIN = 0.05
"""How far the simulator may be off."""

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
    """Print a step's seconds, their ratio to the baseline's, its bar, and the seconds predicted."""
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
