from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_axosparse.distributed.mpi.process_group import init_process_group
from lightning_axosparse.pipeline.loss.combination import Rule
from lightning_axosparse.pipeline.loss.terms import Call, Leaf, Term
from lightning_axosparse.pipeline.loss.weights import LossWeights
from tests.ranks import run_ranks

SIZES = [3, 3, 3]


def mean(count: float, value: float = 1.0) -> Term:
    return Leaf(torch.tensor(value), "mean", count, True)


def total(value: float) -> Term:
    return Leaf(torch.tensor(value), "sum", 0, True)


def unknown(value: float) -> Term:
    return Leaf(torch.tensor(value), None, 0, True)


def added(*terms: Term) -> Term:
    return Call(sum(term.value for term in terms), torch.add, terms)


def over(value: float, count: float) -> Term:
    """A sum, divided by a count of at least one."""
    most = torch.tensor(max(1.0, count))
    below = Call(most, torch.clamp, (Leaf(torch.tensor(count), "sum"),), {"min": 1})
    return Call(torch.tensor(value) / most, torch.div, (total(value), below))


def final(sizes: list[int], losses: list[Term], rule: Rule | None = None) -> list[float]:
    """The weights, after each provisional one was asked for when it is needed."""
    weights = LossWeights(sizes, sum(sizes), rule=rule)
    provisional = []
    for index, term in enumerate(losses):
        weights.add(term)
        if index == len(losses) - 1:
            factor = weights.factor()
        provisional.append(weights.weight(index))
    return [weight * factor for weight in provisional]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=8))
def test_weights_are_shares_of_the_denominators(microbatches: list[tuple[int, int]]) -> None:
    sizes, counts = map(list, zip(*microbatches, strict=True))
    weights = final(sizes, [mean(count) for count in counts])
    if sum(counts):
        assert weights == pytest.approx([count / sum(counts) for count in counts], rel=1e-12)
        assert all(
            (weight == 0) == (count == 0) for weight, count in zip(weights, counts, strict=True)
        )
    else:  # All of it is padding: one micro-batch is differentiated, as on one process.
        assert weights == [0] * (len(sizes) - 1) + [sizes[-1] / sum(sizes)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=8))
def test_weights_are_final_where_all_losses_are_added_first(
    microbatches: list[tuple[int, int]],
) -> None:
    sizes, counts = map(list, zip(*microbatches, strict=True))
    weights = LossWeights(sizes, sum(sizes), adds_all_first=True)
    for count in counts:
        weights.add(mean(count))
    assert weights.factor() == 1
    loss = torch.tensor(1.0, dtype=torch.float64)
    weighted = [weights.weighted(index, loss, ()) for index in range(len(sizes))]
    found = [0.0 if each is None else float(each) for each in weighted]
    assert found == pytest.approx(final(sizes, [mean(count) for count in counts]), rel=1e-12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 5000))
def test_proportional_denominators_give_shares_of_samples_to_the_bit(
    sizes: list[int], tokens: int
) -> None:
    weights = LossWeights(sizes, sum(sizes))
    for index, size in enumerate(sizes):
        weights.add(mean(tokens * size))
        assert weights.weight(index) == size / sum(sizes)
    assert weights.factor() == 1.0


@pytest.mark.parametrize(
    ("rule", "losses", "expected"),
    [
        (None, [unknown(1.0), unknown(2.0)], [0.75, 0.25]),
        (None, [total(3.0), total(4.0)], [1, 1]),
        (None, [added(mean(1), unknown(3.0)), added(mean(3), unknown(3.0))], [0.25, 0.75]),
        (None, [over(6.0, 2.0), over(3.0, 6.0)], [0.25, 0.75]),
        (None, [over(6.0, 0.0), over(3.0, 5.0)], [0.2, 1.0]),
        (None, [over(6.0, 0.0), over(3.0, 0.0)], [1.0, 1.0]),
        ("samples", [total(3.0), total(4.0)], [0.75, 0.25]),
        ("mean", [mean(1), mean(3)], [0.25, 0.75]),
        ("sum", [mean(1), mean(3)], [1, 1]),
        ("sum", [unknown(1.0), unknown(1.0)], [1, 1]),
        (None, [mean(6), unknown(1.0)], [0.75, 0.25]),
        (None, [unknown(1.0), mean(2)], [0.75, 0.25]),
        ("samples", [mean(1), mean(3)], [0.75, 0.25]),
    ],
)
def test_rules(rule: Rule | None, losses: list[Term], expected: list[float]) -> None:
    assert final([3, 1], losses, rule) == pytest.approx(expected, rel=1e-15)


def weights_of_replica(counts: list[list[float]]) -> list[float]:
    """The weights of this rank's micro-batches, where each rank has other denominators."""
    init_process_group("cpu")
    weights = LossWeights([2, 2], 8, replicas=dist.group.WORLD)
    for count in counts[dist.get_rank()]:
        weights.add(mean(count))
    factor = weights.factor()
    return [weights.weight(index) * factor for index in range(2)]


def test_replicas_that_share_a_batch_agree_on_its_denominator() -> None:
    counts = [[7.0, 2.0], [0.0, 4.0]]
    for own, final in zip(counts, run_ranks(2, weights_of_replica, counts), strict=True):
        assert final == pytest.approx([count / 13 for count in own])
