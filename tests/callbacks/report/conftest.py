from __future__ import annotations

import pytest

from lightning_axosparse.callbacks.report.facts import RunFacts
from tests.callbacks.report.runs import make_facts


@pytest.fixture
def facts() -> RunFacts:
    return make_facts()
