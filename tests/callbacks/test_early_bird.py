from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer

from lightning_axosparse import EarlyBirdTicket
from tests.callbacks.small import (
    PartialStrategy,
    SavedAfterStep,
    SavedAt,
    fit,
    seeded_model,
    shapes,
)


def search(**settings):
    by_epochs = {"every": "1 epoch", "draw_by": None}
    small = {"pruning_ratio": 0.5, "window": 3, "threshold": 0.1}
    return EarlyBirdTicket(**{**by_epochs, **small, **settings})


def test_the_ticket_is_drawn_when_the_window_is_full_and_the_masks_have_settled():
    callback = search()
    model, trainer = fit(callback, 6, seeded_model(lr=0.0))
    assert callback.ticket.step == 12
    assert callback.ticket.distances == callback.distances == {8: 0.0, 12: 0.0}
    assert trainer.strategy.swaps == 1
    entries = 6 * 16 + 16 * 8 + 8 * 2
    kept = sum(int(mask.sum()) for mask in callback.ticket.masks.values())
    assert kept == entries - round(0.5 * entries)
    assert list(callback.ticket.masks) == ["model.0.weight", "model.3.weight", "model.4.weight"]
    for name, mask in callback.ticket.masks.items():
        assert shapes(model)[name] == (int(mask.sum()),)
    assert shapes(model)["model.0.bias"] == (16,)


def test_the_largest_weights_are_kept():
    model, callback = seeded_model(lr=0.0), search()
    magnitudes = {name: p.detach().abs().clone() for name, p in model.named_parameters()}
    fit(callback, 3, model)
    kept = torch.cat([magnitudes[name][mask] for name, mask in callback.ticket.masks.items()])
    pruned = torch.cat([magnitudes[name][~mask] for name, mask in callback.ticket.masks.items()])
    assert kept.min() > pruned.max()


def test_changing_masks_draw_no_ticket_and_their_distance_is_logged():
    seen = []

    class Recorder(Callback):
        def on_train_end(self, trainer, pl_module):
            seen.append(float(trainer.callback_metrics["mask_distance"]))

    callback = search(threshold=1e-6)
    with pytest.warns(UserWarning, match=r"No ticket.*20 optimizer steps.*draw_by"):
        model, _ = fit(callback, 5, seeded_model(lr=0.1), callbacks=[Recorder()])
    assert callback.ticket is None
    assert list(callback.distances) == [8, 12, 16, 20]
    assert max(callback.distances.values()) > 0
    assert seen == [pytest.approx(callback.distances[20])]
    assert shapes(model)["model.0.weight"] == (16, 6)


@pytest.mark.parametrize("epoch", [1, 4])
def test_draw_by_epochs(epoch):
    callback = search(threshold=1e-6, draw_by=f"{epoch} epochs")
    fit(callback, 5, seeded_model(lr=0.1))
    assert callback.ticket.step == 4 * epoch
    assert len(callback.ticket.distances) == epoch - 1


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every": 3}, [6, 9, 12, 15, 18]),
        ({"every": 0.15}, [6, 9, 12, 15, 18]),
        ({"every": 3, "draw_by": 10}, [6, 9, 10]),
        ({"every": 3, "draw_by": 0.5}, [6, 9, 10]),
        ({"every": 7, "draw_by": "2 epochs"}, [8]),
        ({"every": 3, "threshold": 1.0}, [6, 9]),
        ({"every": 1 / 32, "threshold": 1.0}, [2, 3]),
    ],
)
@pytest.mark.filterwarnings("ignore:No ticket")
def test_masks_are_compared_and_drawn_when_it_is_time(settings, steps):
    callback = search(**{"threshold": 1e-6, **settings})
    fit(callback, 5, seeded_model(lr=0.1))
    assert list(callback.distances) == steps
    drawn = "draw_by" in settings or "threshold" in settings
    assert (callback.ticket.step if drawn else callback.ticket) == (steps[-1] if drawn else None)


def test_with_accumulation_masks_are_compared_once_a_step():
    callback = search(every=1, threshold=1e-6, draw_by=5)
    fit(callback, 5, seeded_model(lr=0.1), accumulate_grad_batches=2)
    assert list(callback.distances) == [2, 3, 4, 5]
    assert callback.ticket.step == 5


class Seen(Callback):
    """Notes whether the weights are dense in the middle of an epoch and in validation."""

    def __init__(self, callback):
        self.callback, self.validated, self.trained = callback, [], []

    def on_train_batch_end(self, trainer, *args):
        self.trained.append(self.callback.ticket is None)

    def on_validation_start(self, trainer, pl_module):
        self.validated.append(self.callback.ticket is None)


def test_an_epoch_at_whose_end_the_ticket_is_drawn_is_validated_dense():
    for draw_by, trained in ((4, [True] * 4 + [False] * 4), (6, [True] * 5 + [False] * 3)):
        callback = search(draw_by=draw_by)
        seen = Seen(callback)
        fit(callback, 2, validated=True, callbacks=[seen])
        assert seen.trained == trained
        assert seen.validated == [True, False]


@pytest.mark.parametrize("when", ["every", "draw_by"])
def test_a_share_of_a_run_without_an_end_is_refused_before_it_starts(when):
    callback = search(**{when: 0.5})
    with pytest.raises(MisconfigurationException, match=r"max_steps.*every=500"):
        fit(callback, -1, max_time={"seconds": 30})
    search(every=500, draw_by="3 epochs").validate_fit(endless())


def endless():
    trainer = Trainer(max_epochs=-1, strategy=PartialStrategy(), logger=False)
    trainer.state.fn = "fit"
    trainer.strategy.connect(seeded_model())
    return trainer


def test_training_goes_on_with_the_unpruned_weights():
    model, trainer = fit(search(draw_by="2 epochs"), 4, seeded_model(lr=0.1))
    assert trainer.global_step == 16
    weight = model.state_dict()["model.0.weight"]
    mask = trainer.callbacks[0].ticket.masks["model.0.weight"]
    assert weight.shape == (16, 6)
    assert not weight[~mask].any()
    assert weight[mask].all()


def test_the_highest_floor_hamming_distance_and_exclusion():
    callback = search(floor=1.0, distance="hamming", which={"model.3.*": False})
    fit(callback, 3, seeded_model(lr=0.0))
    assert callback.ticket.layer_sparsity() == {"model.0.weight": 0.5, "model.4.weight": 0.5}
    assert callback.ticket.distance == "hamming"


def test_weights_that_keep_hardly_anything_are_named():
    model = seeded_model(lr=0.0)
    with torch.no_grad():
        model.model[3].weight.mul_(1e-3)
    callback = search(pruning_ratio=0.7, floor=0.03, draw_by="1 epoch")
    with pytest.warns(UserWarning, match=r"keeps less than 2\.0% of model\.3\.weight: "):
        fit(callback, 1, model)
    assert int(callback.ticket.masks["model.3.weight"].sum()) == 1


@pytest.mark.parametrize(
    ("saved", "saved_at", "is_drawn"),
    [
        (SavedAt, 1, False),
        (SavedAt, 3, True),
        (SavedAfterStep, 8, False),
        (SavedAfterStep, 16, False),  # It is due after this last batch of an epoch.
    ],
)
def test_a_resumed_run_draws_the_same_ticket(saved, saved_at, is_drawn, tmp_path):
    settings = {"threshold": 0.02, "draw_by": "4 epochs"}
    whole, resumed = search(**settings), search(**settings)
    path = tmp_path / "a.ckpt"
    expected, _ = fit(whole, 6, callbacks=[saved(saved_at, path)])
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["callbacks"]["EarlyBirdTicket"]["ticket"] is not None) == is_drawn
    model, trainer = fit(resumed, 6, ckpt_path=path)
    assert whole.ticket.step == 16
    assert resumed.ticket == whole.ticket
    assert resumed.distances == whole.distances
    assert trainer.strategy.swaps == 1
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("saved_at", [3, 8])
def test_a_run_resumed_inside_an_epoch_draws_the_same_ticket(saved_at, tmp_path):
    settings = {"threshold": 1e-6, "every": 3, "draw_by": 9}
    whole, path = search(**settings), tmp_path / "a.ckpt"
    # Lightning does not resume the order of batches inside an epoch.
    expected, _ = fit(whole, 4, callbacks=[SavedAfterStep(saved_at, path)], same_batches=True)
    for origin in ("after", "before"):
        if origin == "before":  # The search's own hook at this step has yet to run.
            first = SavedAfterStep(saved_at, path)
            fit(first, 4, callbacks=[search(**settings)], same_batches=True)
        resumed = search(**settings)
        model, _ = fit(resumed, 4, ckpt_path=path, same_batches=True)
        assert resumed.ticket == whole.ticket
        assert list(resumed.distances) == [6, 9]
        assert resumed.distances == whole.distances
        for name, tensor in expected.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)


def test_matrix_optimizers_are_rejected_when_fit_starts():
    model = seeded_model(optimizer=torch.optim.Adafactor)
    with pytest.raises(MisconfigurationException, match="Adafactor cannot"):
        fit(search(), 1, model)
    assert shapes(model)["model.0.weight"] == (16, 6)
