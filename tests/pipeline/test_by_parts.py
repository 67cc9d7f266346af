"""The losses of micro-batches are weighted so that they add up to that of the batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.pipeline.by_parts import LossWeights
from lightning_axosparse.pipeline.microbatch import split


@given(st.lists(st.integers(0, 1), min_size=1, max_size=40), st.integers(1, 6))
def test_weighted_means_are_the_mean_of_the_batch(counted: list[int], microbatches: int) -> None:
    values = torch.arange(1.0, len(counted) + 1, dtype=torch.float64)
    batch = {"values": values, "counts": torch.tensor(counted)}
    parts = split(batch, microbatches)
    weights = LossWeights(lambda part: part["counts"].sum(), parts)
    means = [(p.batch["values"] * p.batch["counts"]).sum() / p.batch["counts"].sum() for p in parts]
    mean = (values * batch["counts"]).sum() / sum(counted) if sum(counted) else math.nan
    torch.testing.assert_close(
        weights.combined(means), torch.as_tensor(mean).double(), rtol=1e-14, atol=0, equal_nan=True
    )


def test_a_mean_is_weighted_by_samples_and_a_sum_is_not() -> None:
    parts = split(torch.zeros(8, 1), 3)
    assert LossWeights("mean", parts).of == [2 / 8, 3 / 8, 3 / 8]
    assert LossWeights("sum", parts).of == [1, 1, 1]


@pytest.mark.parametrize("count", [-1, math.inf, math.nan, None, torch.ones(2), "two"])
def test_a_function_that_returns_no_count_is_refused(count: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"loss=\.\.\.\) returned"):
        LossWeights(lambda part: count, split(torch.zeros(4, 1), 2))
