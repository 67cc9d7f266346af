from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_axosparse.callbacks.ticket_search import WHEN, Moment, Progress, total_steps


def hundred():
    return 100


def never_asked():
    raise AssertionError("the total is asked for shares only")


@pytest.mark.parametrize(
    ("when", "moment"),
    [
        (7, Moment(7, "steps")),
        ("1 epoch", Moment(1, "epochs")),
        ("12 epochs", Moment(12, "epochs")),
    ],
)
def test_steps_and_epochs(when, moment):
    assert WHEN.fits(when)
    assert Moment.of(when, never_asked) == moment


@pytest.mark.parametrize(("share", "steps"), [(0.25, 25), (1.0, 100), (0.333, 33), (1e-9, 1)])
def test_shares_of_the_run(share, steps):
    assert WHEN.fits(share)
    assert Moment.of(share, hundred) == Moment(steps, "steps")


@pytest.mark.parametrize("when", ["", "1", "0 epochs", "1.5 epochs", "-1 epochs", "1 epochs ", "x"])
def test_other_texts_do_not_fit(when):
    assert not WHEN.fits(when)


@given(st.integers(1, 50), st.lists(st.integers(0, 200), min_size=2, max_size=20, unique=True))
def test_it_comes_again_once_for_each_multiple_that_is_passed(count, steps):
    moment, seen = Moment(count, "steps"), [Progress(0), *map(Progress, sorted(steps))]
    again = [moment.again_since(one, two) for one, two in pairwise(seen)]
    passed = [
        any(step % count == 0 for step in range(one.steps + 1, two.steps + 1))
        for one, two in pairwise(seen)
    ]
    assert again == passed
    assert [moment.reached(at) for at in seen] == [at.steps >= count for at in seen]


def test_epochs_are_counted_when_they_have_ended():
    moment = Moment(2, "epochs")
    assert not moment.reached(Progress(500, 1))
    assert moment.reached(Progress(8, 2))
    assert moment.again_since(Progress(8, 3), Progress(9, 4))
    assert not moment.again_since(Progress(8, 2), Progress(900, 3))


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
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    assert asked.totals == {trainer.global_step} == {steps}
