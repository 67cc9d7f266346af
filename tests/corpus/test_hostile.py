"""No step that differs in micro-batches differs in silence, and what can be right is right."""

from __future__ import annotations

import pytest

from tests.corpus.harness import allowed_outcomes, compare, entries

HOSTILE = entries("hostile")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_step_is_right_or_said(name: str) -> None:
    which = HOSTILE[name]
    outcome = compare(which)
    assert outcome.kind in allowed_outcomes(which), outcome
