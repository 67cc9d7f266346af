"""Compares what the tests of a mode did with another mode and with the expected failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

EXPECTED = Path(__file__).with_name("expected_failures.txt")

Outcomes = Mapping[str, list[str]]
"""Test -> its outcome, and the last line of its error."""

BY_CHANCE = ", by chance"
"""What follows a mode's name in the list where tests fail or pass as the ranks happen to run."""

NOT_RUN = ["failed", "it was not run"]
"""The outcome of a test that the other mode has run."""


@dataclass(frozen=True)
class Verdict:
    """What one mode did.

    Attributes:
        passed: number of tests that passed.
        failed: number of tests that failed, those of the other mode left out.
        reference: number of tests that passed in the other mode.
        unexpected: failures that nobody expects, with their errors, and tests that did not run.
        surprises: tests that were expected to fail and do not, or are not there.
    """

    passed: int
    failed: int
    reference: int
    unexpected: dict[str, str]
    surprises: list[str]

    def __bool__(self) -> bool:
        return not self.unexpected and not self.surprises

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed; {self.reference} passed"
        wrong = [f"  unexpected failure: {test}\n    {e}" for test, e in self.unexpected.items()]
        wrong += [f"  expected to fail, but does not: {test}" for test in self.surprises]
        return "\n".join([counts, *wrong])


def parse(text: str) -> dict[str, dict[str, str]]:
    """Read a list of expected failures: mode -> test -> reason.

    A line that begins with ``==`` names the mode, indented lines are tests, and the paragraph
    before them is their reason. A test without ``[`` stands for all its parameters.

    Raises:
        ValueError: for a test without a mode or a reason, or one that is there twice.
    """
    expected: dict[str, dict[str, str]] = {}
    mode, reason, paragraph_ended = "", "", True
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if line.startswith("=="):
            mode, reason = words.strip("= "), ""
            expected.setdefault(mode, {})
        elif line.startswith(" ") and words:
            if not mode or not reason or words in expected[mode]:
                raise ValueError(f"line {number}: {words} has no reason or mode, or is there twice")
            expected[mode][words] = reason
            paragraph_ended = True
        elif words and not words.startswith("#"):
            reason = words if paragraph_ended else f"{reason} {words}"
            paragraph_ended = False
    return expected


def judge(
    ours: Outcomes,
    reference: Outcomes,
    expected: Iterable[str],
    folders: Iterable[str],
    by_chance: Iterable[str] = (),
) -> Verdict:
    """Compare the outcomes of a mode.

    Args:
        ours: its outcomes.
        reference: those of the mode it is compared with; what fails there counts neither way.
        expected: the tests that are expected to fail.
        folders: what was run; expectations of other folders are left alone.
        by_chance: the tests that may fail or pass.
    """
    passing = [test for test, (outcome, _) in reference.items() if outcome == "passed"]
    counted = {test: ours.get(test, NOT_RUN) for test in passing}
    failed = {test: error for test, (outcome, error) in counted.items() if outcome == "failed"}
    folders = tuple(folders)
    covered, either = _covered(expected, counted, folders), _covered(by_chance, counted, folders)
    known, uncertain = (set().union(*tests.values()) for tests in (covered, either))
    return Verdict(
        passed=sum(outcome == "passed" for outcome, _ in counted.values()),
        failed=len(failed),
        reference=len(passing),
        unexpected={t: error for t, error in failed.items() if t not in known | uncertain},
        surprises=sorted(
            {test for test in known - uncertain if test not in failed}
            | {entry for entry, tests in (covered | either).items() if not tests}
        ),
    )


def _covered(
    entries: Iterable[str], tests: Iterable[str], folders: tuple[str, ...]
) -> dict[str, set[str]]:
    """The tests for which each entry of these folders stands."""
    mine = [entry for entry in entries if entry.startswith(folders)]
    return {entry: {test for test in tests if _covers(entry, test)} for entry in mine}


def _covers(entry: str, test: str) -> bool:
    return test == entry or ("[" not in entry and test.startswith(f"{entry}["))
