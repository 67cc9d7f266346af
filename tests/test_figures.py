"""The README's figures are those of the tables of the benchmarks, and the same on every page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of all tables."""
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def results(text: str) -> dict[str, tuple[str, list[str]]]:
    """What is measured -> the benchmark of its link, and the other cells."""
    found = {}
    for first, *others in rows(text):
        link = re.match(r"\[([^]]+)\]\((?:\.\./)?benchmarks/(\w+)", first)
        if link is not None:
            found[re.sub(r"[][]|\([^)]*\)", "", first)] = link[2], others
    return found


RESULTS = results(README)


def table(folder: str, *starts: str) -> list[list[str]]:
    """The rows of a benchmark's tables that begin so."""
    every = rows((ROOT / "benchmarks" / folder / "README.md").read_text())
    found = [
        row for row in every if all(a.startswith(b) for a, b in zip(row, starts, strict=False))
    ]
    assert found, starts
    return found


def state(ratio: int) -> str:
    return f"{table('memory', f'sparse, {ratio} % pruned')[0][3]} times less"


def peak(ratio: int) -> str:
    shares = [float(cell) for cell in table("memory", f"sparse, {ratio} % pruned")[1][2::2]]
    return f"{min(shares)} to {max(shares)} times less"


def block(ratio: int) -> str:
    measured = ("1024", "512", "forward + backward")
    blocks = [table("overhead", *measured)[0]]
    blocks += [table("overhead", machine, *measured)[0] for machine in ("Zen 3", "Zen 4", "Zen 5")]
    return percents(row[-3 if ratio == 80 else -2] for row in blocks)


def step(ratio: int) -> str:
    return percents([table("allreduce", f"{ratio} % pruned", "7" if ratio == 80 else "3")[0][2]])


def pipeline(ratio: int) -> str:
    if ratio == 90:
        return ""
    on_epyc, on_xeon = list[str](), list[str]()
    for ranks in (2, 4):
        case = f"{ranks} ranks, 131 kB"
        on_epyc.append(table("pipeline", case, "message-driven")[0][3])
        # The last table is of the other machine: ratios alone, second the message-driven order's.
        ratios = [row for row in table("pipeline", case) if re.fullmatch(r"\d\.\d+", row[1])]
        on_xeon.append(ratios[-1][2])
    return percents([*on_epyc, *on_xeon])


def perplexity(ratio: int) -> str:
    return table("perplexity", "LIBRARY", f"{ratio}% gradual")[0][6].replace("+", "+ ")


def percents(cells: object) -> str:
    shares = sorted({f"{100 * float(cell):.0f}" for cell in cells})  # type: ignore[attr-defined]
    return f"{' to '.join([shares[0], *shares[1:][-1:]])} %"


MEASURED: dict[str, Callable[[int], str]] = {
    "model state": state,
    "memory of the process": peak,
    "a block": block,
    "a data-parallel step": step,
    "a pipeline's step": pipeline,
    "perplexity": perplexity,
}


def test_every_row_is_compared() -> None:
    assert [next(name for name in MEASURED if row.startswith(name)) for row in RESULTS] == list(
        MEASURED
    )


@pytest.mark.parametrize("name", MEASURED)
def test_a_row_has_the_figures_of_the_benchmark(name: str) -> None:
    (row,) = (cells for what, (_, cells) in RESULTS.items() if what.startswith(name))
    assert row[1:] == [MEASURED[name](80), MEASURED[name](90)]


def test_the_site_begins_with_the_same_rows() -> None:
    assert results((ROOT / "docs" / "index.md").read_text()) == RESULTS


def test_the_other_pages_repeat_them() -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    for name in ("model state", "memory of the process", "a block", "a data-parallel step"):
        (row,) = (cells for what, (_, cells) in RESULTS.items() if what.startswith(name))
        assert [row[1], row[2]] in [cells[2:] for cells in rows(page)], name


def test_the_versions_are_those_that_the_package_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, badge in (("torch", "torch"), ("lightning", "Lightning")):
        floor = re.search(rf'^    "{name}>=(\d+\.\d+)', project, re.MULTILINE)
        assert floor is not None
        assert f"badge/{badge}-{floor[1]}" in README
    python = re.search(r'^requires-python = ">=([\d.]+)"', project, re.MULTILINE)
    tested = re.findall(
        r'python: "([\d.]+)"|python-version: "([\d.]+)"',
        (ROOT / ".github" / "workflows" / "test.yml").read_text(),
    )
    newest = max((a or b for a, b in tested), key=lambda v: [int(n) for n in v.split(".")])
    assert python is not None
    assert f"badge/Python-{python[1]}_to_{newest}-" in README
