"""README's figures are those of the tables in `benchmarks/`, its picture is that of its script."""

from __future__ import annotations

import re

import pytest

from benchmarks.pipeline.picture import picture
from tests.ranks import REPOSITORY

ROWS = [
    (folder, cells)
    for page in ("README.md", "docs/index.md", "docs/results.md")
    for folder, cells in re.findall(
        r"^\|[^|\n]*\((?:\.\./)?benchmarks/(\w+)[^)|]*\)[^|\n]*\|(.*)\|$",
        (REPOSITORY / page).read_text(),
        re.MULTILINE,
    )
]


@pytest.mark.parametrize(("folder", "cells"), ROWS, ids=[f"{a}: {b[:40]}" for a, b in ROWS])
def test_figures_stand_in_the_tables(folder: str, cells: str) -> None:
    tables = (REPOSITORY / "benchmarks" / folder / "README.md").read_text()
    measured = [float(number) for number in re.findall(r"\d*\.?\d+", tables)]
    said = cells.split("|", 1)[1]  # the first cell is the baseline
    for number, percent in re.findall(r"(\d*\.?\d+)(?= (?:to \S+ |± \S+ )?(%?))", said):
        digits = len(number.partition(".")[2])
        rounded = {round(each, digits) for each in measured}
        if percent:
            rounded |= {round(100 * each, digits) for each in measured}
        assert float(number) in rounded, number


def test_there_are_figures() -> None:
    assert len(ROWS) >= 12


def test_the_picture_is_that_of_the_script() -> None:
    assert (REPOSITORY / "docs" / "images" / "step.svg").read_text() == picture()
