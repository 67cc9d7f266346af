"""Ordinary steps train as on one process, and nothing is said of them."""

from __future__ import annotations

import pytest

from tests.corpus.harness import allowed_outcomes, compare, entries, sampled

ORDINARY = entries("ordinary")
WHOLE = {
    "AdaptiveLogSoftmax",
    "CrossEntropyLossSmoothed",
    "MultiMarginLoss",
    "T5",
    "accuracy_by_a_quotient",
    "ctc_loss",
    "divided_by_the_count_before_the_sum",
    "last_token_of_each",
    "lists_of_tensors",
    "masked_autoencoder",
    "multi_label_margin_loss",
    "retina_net_by_positives",
    "spectral",
    "triplets",
    "two_loaders_at_once",
    "two_views",
    "weighted_over_time",
}
"""Those whose loss is differentiated once a batch, as nothing shows that it need not be."""


@pytest.mark.parametrize("name", sampled(ORDINARY))
def test_an_ordinary_step_is_right(name: str) -> None:
    which = ORDINARY[name]
    outcome = compare(which)
    assert outcome.kind in allowed_outcomes(which), outcome
    assert bool(outcome.whole) == (name in WHOLE), outcome.whole


def test_none_is_warned_of_or_refused() -> None:
    assert len(ORDINARY) >= 120
    assert ORDINARY.keys() >= WHOLE
    assert not [one for one in ORDINARY.values() if one.reason]
