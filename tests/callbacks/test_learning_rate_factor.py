from __future__ import annotations

import lightning as L
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse import AxoSparseStrategy, EarlyBirdTicket, LearningRateFactor
from lightning_axosparse.examples.data import TextDataModule
from lightning_axosparse.examples.gpt import GPT

STEPS = 8


class Rates(L.Callback):
    """By what the strategy multiplies the rates in each step, and what is logged of it."""

    def __init__(self):
        self.used, self.logged = [], []

    def on_train_batch_end(self, trainer, *args):
        self.used.append(trainer.strategy.learning_rate_factor)
        self.logged.append(float(trainer.callback_metrics.get("learning_rate_factor", 1)))


class SavedAfterStep(L.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("What's past is prologue. " * 200)
    return TextDataModule(path, context=16, batch_size=4)


def fit(data, *callbacks, ckpt_path=None, strategy=None, **options):
    L.seed_everything(0, verbose=False)
    model = GPT(width=8, depth=1, heads=1, context=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy or AxoSparseStrategy(),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, "limit_train_batches": STEPS // 2, **options},
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return model


@pytest.mark.parametrize(
    ("factor", "after", "used"),
    [
        (2.5, 3, [1, 1, 1, *[2.5] * 5]),
        (2.5, 0.25, [1, 1, *[2.5] * 6]),
        (lambda step: 1 + step, "1 epoch", [1, 1, 1, 1, 1, 2, 3, 4]),
    ],
)
def test_the_factor_begins_when_it_should_and_is_logged(factor, after, used, data):
    seen = Rates()
    fit(data, LearningRateFactor(factor, after), seen)
    assert seen.used == seen.logged == used


def test_a_dense_run_has_the_rates_of_a_pruned_one(data):
    """A ticket that keeps all but one entry in a thousand changes next to nothing else."""
    control = fit(data, LearningRateFactor(3.0, 3))
    dense = fit(data)
    ticket = EarlyBirdTicket(0.001, method="early-bird", draw_by=3, threshold=1e-6)
    nearly = fit(data, ticket, LearningRateFactor(3.0))

    def distance(one, other):
        pairs = zip(one.parameters(), other.parameters(), strict=True)
        return sum(float((a - b).detach().square().sum()) for a, b in pairs) ** 0.5

    assert distance(control, nearly) < 0.05 * distance(control, dense)


def test_a_resumed_run_goes_on_with_its_factor_and_another_run_begins_anew(data, tmp_path):
    path, seen, again = tmp_path / "a.ckpt", Rates(), Rates()
    callback = LearningRateFactor(lambda step: 1 + step, 3)
    fit(data, callback, SavedAfterStep(5, path))
    fit(data, LearningRateFactor(lambda step: 1 + step, 3), seen, ckpt_path=path)
    assert seen.used == [3, 4, 5]
    fit(data, callback, again)
    assert again.used == [1, 1, 1, 1, 2, 3, 4, 5]


def test_what_cannot_be_is_refused(data):
    with pytest.raises(MisconfigurationException, match=r"strategy='axosparse'.*SingleDevice"):
        fit(data, LearningRateFactor(), strategy="auto")
    with pytest.raises(MisconfigurationException, match="no callback draws one"):
        fit(data, LearningRateFactor())
    with pytest.raises(MisconfigurationException, match="there is no share of it"):
        fit(data, LearningRateFactor(after=0.25), max_epochs=-1)
