"""Leaves the environment as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest.mock import patch

import pytest

from tests.ranks import warm_python

pytest.register_assert_rewrite("tests.strategy.compat.harness")


@pytest.fixture(autouse=True)
def seed_of_this_test() -> Iterator[None]:
    """Lightning keeps the seed in the environment, where samplers of later tests would find it."""
    warm_python()  # its address in the environment serves later tests, too
    with patch.dict(os.environ):
        yield
