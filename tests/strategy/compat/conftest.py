"""Two jobs of real ranks, in which all tests of this folder run what they
need: ranks start slowly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import run_ranks, warm_python

pytest.register_assert_rewrite("tests.strategy.compat.harness")


def two_ranks() -> dict[str, Any]:
    from tests.strategy.compat import harness, test_metrics, test_sampling

    groups = harness.connect(g_inter=2)
    return {
        "stages": test_metrics.fit_on_stages(groups, 4, 0.1),
        "ddp": test_metrics.fit_ddp(),
        "batches": test_sampling.batches_on_stages(groups),
    }


def four_ranks() -> dict[str, Any]:
    from tests.strategy.compat import harness, test_gradients, test_metrics

    groups = harness.connect(g_inter=2)
    return {
        "grid": test_metrics.fit_on_stages(groups, 3, 0.0),
        "metrics": test_metrics.unusual_metrics(groups),
        "precision": test_gradients.clip_and_scale(),
    }


@pytest.fixture(autouse=True)
def seed_of_this_test() -> Iterator[None]:
    """Lightning keeps the seed in the environment, where samplers of later tests would find it."""
    warm_python()  # its address in the environment serves later tests, too
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def on_two() -> list[dict[str, Any]]:
    """What each of two ranks found: two stages, or two of Lightning's replicas."""
    return run_ranks(2, two_ranks)


@pytest.fixture(scope="session")
def on_four() -> list[dict[str, Any]]:
    """What each of four ranks found: two stages by two replicas, or four stages."""
    return run_ranks(4, four_ranks)
