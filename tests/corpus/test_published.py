"""Published modules run as they are: equal, or told what differs."""

from __future__ import annotations

import pytest

from tests.corpus.harness import allowed_outcomes, compare, entries

PUBLISHED = entries("published")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_module_is_right_or_told(name: str) -> None:
    which = PUBLISHED[name]
    outcome = compare(which)
    assert outcome.kind in allowed_outcomes(which), outcome
