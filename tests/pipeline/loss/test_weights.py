"""Weights of micro-batches make of their losses that of the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.pipeline.loss.operators import CONSTANT, ROWS, Note, Total, Unknown
from lightning_axosparse.pipeline.loss.weights import LossWeights


def mean(*counts: float) -> Total:
    return Total("mean", frozenset(counts))


TOTAL = Total("sum")


def added(weights: LossWeights, notes: list[Note]) -> list[float]:
    """The final weights, after each provisional one was asked for when it is needed."""
    provisional = []
    factor = 1.0
    for index, note in enumerate(notes):
        weights.add(note)
        if index == len(notes) - 1:
            factor = weights.factor()
        provisional.append(weights.weight(index))
    return [weight * factor for weight in provisional]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=8))
def test_weights_are_shares_of_the_denominators(microbatches: list[tuple[int, int]]) -> None:
    sizes, counts = map(list, zip(*microbatches, strict=True))
    weights = added(LossWeights(sizes), [mean(count) for count in counts])
    if sum(counts):
        assert weights == pytest.approx([count / sum(counts) for count in counts], rel=1e-12)
        assert all(
            (weight == 0) == (count == 0) for weight, count in zip(weights, counts, strict=True)
        )
    else:  # All of it is padding: one micro-batch is differentiated, as on one process.
        assert weights == [0] * (len(sizes) - 1) + [sizes[-1] / sum(sizes)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5000))
def test_proportional_denominators_give_shares_of_samples_to_the_bit(
    sizes: list[int], tokens: int
) -> None:
    weights = LossWeights(sizes)
    for index, size in enumerate(sizes):
        weights.add(mean(tokens * size))
        assert weights.weight(index) == size / sum(sizes)
    assert weights.factor() == 1.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=8))
def test_the_loss_of_the_batch_is_the_weighted_sum(microbatches: list[tuple[int, int]]) -> None:
    sizes, counts = map(list, zip(*microbatches, strict=True))
    weights = LossWeights(sizes)
    values = [torch.tensor(float(n), dtype=torch.float64) for n in range(len(sizes))]
    final = added(weights, [mean(count) for count in counts])
    if sum(counts):
        expected = sum(n * weight for n, weight in enumerate(final))
        assert float(weights.combined(values)) == pytest.approx(expected, rel=1e-12)
    else:
        assert float(weights.combined(values)) == len(sizes) - 1


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([TOTAL, TOTAL], [1, 1]),
        ([mean(1), mean(3)], [0.25, 0.75]),
        ([mean(3, 6), mean(1, 2)], [0.75, 0.25]),
        ([CONSTANT, CONSTANT], [0.75, 0.25]),
    ],
)
def test_what_is_added_up(notes: list[Note], expected: list[float]) -> None:
    weights = LossWeights([3, 1])
    assert added(weights, notes) == pytest.approx(expected, rel=1e-15)
    assert weights.problem == ""


@pytest.mark.parametrize(
    ("notes", "problem"),
    [
        ([Unknown(), Unknown()], "not a mean or a sum"),
        ([mean(3), Unknown("a reason")], "a reason"),
        ([ROWS, ROWS], "not a mean or a sum"),
        ([mean(3), TOTAL], "in different ways"),
        ([mean(3, 5), mean(1, 2)], "different numbers of samples"),
    ],
)
def test_what_does_not_add_up(notes: list[Note], problem: str) -> None:
    weights = LossWeights([3, 1])
    added(weights, notes)
    assert problem in weights.problem


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ([Unknown(), Unknown()], [0.75, 0.25]),
        ([mean(3), TOTAL], [0.75, 0.25]),
        ([mean(3, 5), mean(1, 2)], [0.75, 0.25]),
    ],
)
def test_a_loss_of_which_nothing_is_known_is_a_mean_where_that_may_be_guessed(
    notes: list[Note], expected: list[float]
) -> None:
    weights = LossWeights([3, 1], may_guess=True)
    assert added(weights, notes) == pytest.approx(expected)
    assert weights.problem == ""
