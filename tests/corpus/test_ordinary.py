"""Ordinary steps train as on one process, and nothing is said of them."""

from __future__ import annotations

import pytest

from tests.corpus.harness import allowed_outcomes, compare, entries

ORDINARY = entries("ordinary")


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_step_is_right(name: str) -> None:
    which = ORDINARY[name]
    outcome = compare(which)
    assert outcome.kind in allowed_outcomes(which), outcome
