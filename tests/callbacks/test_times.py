from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_axosparse.callbacks.times import WHEN, Progress, in_steps, total_steps
from tests.quiet import QUIET

NOT_ASKED = None
"""Stands for the trainer, which is asked for its optimizer steps for shares only."""


@pytest.mark.parametrize(
    ("when", "times"), [(7, 10), (70, 1), (71, 0), ("1 epoch", 25), ("12 epochs", 2)]
)
def test_steps_and_epochs(when, times):
    assert WHEN.fits(when)
    assert Progress(70, 25).times(when, NOT_ASKED) == times


@pytest.mark.parametrize(("share", "steps"), [(0.25, 25), (1.0, 100), (0.333, 33), (1e-9, 1)])
def test_shares_of_the_run(share, steps):
    assert WHEN.fits(share)
    trainer = SimpleNamespace(estimated_stepping_batches=100, callbacks=[])
    assert in_steps(share, trainer) == steps
    assert Progress(70, 25).times(share, trainer) == 70 // steps


@pytest.mark.parametrize("when", ["", "1", "0 epochs", "1.5 epochs", "-1 epochs", "1 epochs ", "x"])
def test_other_texts_do_not_fit(when):
    assert not WHEN.fits(when)


@given(st.integers(1, 50), st.lists(st.integers(0, 200), min_size=2, max_size=20, unique=True))
def test_it_comes_again_once_for_each_multiple_that_is_passed(count, steps):
    seen = [Progress(0), *map(Progress, sorted(steps))]
    times = [at.times(count, NOT_ASKED) for at in seen]
    again = [two > one for one, two in pairwise(times)]
    passed = [
        any(step % count == 0 for step in range(one.steps + 1, two.steps + 1))
        for one, two in pairwise(seen)
    ]
    assert again == passed
    assert [passed > 0 for passed in times] == [at.steps >= count for at in seen]


def test_epochs_are_counted_when_they_have_ended():
    ended = [Progress(500, 1), Progress(8, 2), Progress(900, 3), Progress(9, 4)]
    assert [at.times("2 epochs", NOT_ASKED) for at in ended] == [0, 1, 1, 2]


class TotalSteps(Callback):
    """Asks for the optimizer steps of the run at its start and before each batch."""

    def __init__(self):
        self.totals = set()

    def on_train_start(self, trainer, *_):
        self.totals.add(total_steps(trainer))

    def on_train_batch_start(self, trainer, *_):
        self.totals.add(total_steps(trainer))


@pytest.mark.parametrize(
    ("factors", "most", "steps"),
    [({0: 2}, -1, 12), ({0: 8, 2: 1, 9: 3}, -1, 12), ({1: 2}, -1, 14), ({1: 2}, 9, 9)],
)
def test_steps_of_a_run_whose_epochs_accumulate_different_numbers_of_batches(factors, most, steps):
    asked = TotalSteps()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=4,
        max_steps=most,
        limit_train_batches=5,
        limit_val_batches=0,
        callbacks=[asked, GradientAccumulationScheduler(factors)],
        **QUIET,
    )
    trainer.fit(BoringModel())
    assert asked.totals == {trainer.global_step} == {steps}
