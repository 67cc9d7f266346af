from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from lightning_axosparse import GradualPruning
from lightning_axosparse.pruning import Ticket
from lightning_axosparse.sparse.module.parameters import layouts
from tests.callbacks.small import (
    Model,
    PartialStrategy,
    SavedAfterStep,
    SavedAt,
    fit,
    seeded_model,
    shapes,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": 0.9, "end": 0.5}, r"end=0\.5 must come after start=0\.9"),
        ({"start": 5, "end": 5}, "end=5 must come after start=5"),
    ],
)
def test_arguments_out_of_range_are_rejected(settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        GradualPruning(**settings)


def test_by_default_a_run_of_any_length_prunes_from_a_quarter_to_nine_tenths_of_it():
    for ratio, epochs, swaps in ((0.3, 5, 13), (0.98, 40, 21)):
        callback, strategy = GradualPruning(ratio), PartialStrategy()
        model, _ = fit(callback, epochs, seeded_model(lr=0.1), strategy)
        assert callback.ticket.step == callback.drawn_at == round(0.9 * 4 * epochs)
        assert callback.ticket.pruning_ratio == ratio
        assert strategy.swaps == swaps, "as often as once a 32nd, or once a step"
        assert strategy.draws == 1
        kept = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
        assert kept < 300


def test_the_ratio_rises_in_steps_and_nothing_pruned_comes_back():
    kept = []

    class Watcher(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            stored = {name: layout.mask() for name, layout in layouts(module).items()}
            if stored and (not kept or any((stored[n] != kept[-1][n]).any() for n in stored)):
                kept.append(stored)

    callback = GradualPruning(0.5, every=4, start=8, end=24)
    fit(callback, 8, seeded_model(lr=0.1), callbacks=[Watcher()])
    masks = [*kept, callback.ticket.masks]
    assert len(kept) == 4  # after 12, 16 and 20 steps, and at the draw
    for before, after in pairwise(masks):
        for name, mask in after.items():
            assert not (mask & ~before[name]).any()
    entries = 6 * 16 + 16 * 8 + 8 * 2
    counts = [sum(int(mask.sum()) for mask in each.values()) for each in kept]
    expected = [entries * (1 - 0.5 * (1 - (1 - way / 4) ** 3)) for way in (1, 2, 3, 4)]
    assert counts == pytest.approx(expected, abs=2)


def test_a_run_that_ends_before_the_ticket_says_how_far_it_has_pruned():
    with pytest.warns(UserWarning, match=r"8 optimizer steps: end=12 .*reached\. 56% of the entr"):
        fit(GradualPruning(0.6, 2, 12, 1), 2)


@pytest.mark.parametrize("saved_at", [2, 6, 8, 10])
def test_a_resumed_run_draws_the_same_ticket(saved_at, tmp_path):
    whole, resumed = GradualPruning(0.6, 3, 9, 2), GradualPruning(0.6, 3, 9, 2)
    path = tmp_path / "a.ckpt"
    saved = SavedAfterStep(saved_at, path)
    expected, _ = fit(whole, 3, callbacks=[saved], same_batches=True)
    model, _ = fit(resumed, 3, ckpt_path=path, same_batches=True)
    assert resumed.ticket == whole.ticket
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.fixture
def ticket():
    masks = {"model.0.weight": torch.rand(16, 6) < 0.3, "model.4.weight": torch.rand(2, 8) < 0.3}
    return Ticket(masks, 0.7)


def test_a_ticket_or_its_file_is_adopted_when_fit_starts(ticket, tmp_path):
    ticket.save(tmp_path / "a.ticket")
    for source in (ticket, tmp_path / "a.ticket", str(tmp_path / "a.ticket")):
        callback = GradualPruning(ticket=source)
        model, trainer = fit(callback, 1)
        assert callback.ticket == ticket
        assert trainer.strategy.swaps == 1
        assert shapes(model)["model.0.weight"] == (int(ticket.masks["model.0.weight"].sum()),)
        fit(callback, 1, model)  # again, with the weights sparse already


def test_a_ticket_of_another_shape_is_rejected_where_the_weights_are_sparse_already(ticket):
    model, _ = fit(GradualPruning(ticket=ticket), 1)
    other = Ticket({"model.0.weight": torch.ones(16, 5, dtype=bool)}, 0.5)
    with pytest.raises(MisconfigurationException, match=r"\(16, 5\).*\(16, 6\)"):
        fit(GradualPruning(ticket=other), 1, model)


def test_a_callback_of_an_earlier_run_says_that_it_has_a_ticket():
    callback = GradualPruning(0.5, 1, 4)
    fit(callback, 2)
    with pytest.warns(UserWarning, match="GradualPruning prunes from the start.*an earlier one"):
        fit(callback, 1)


def test_a_checkpoint_with_another_ticket_is_rejected(ticket, tmp_path):
    path = tmp_path / "a.ckpt"
    fit(GradualPruning(0.5, 1, 4), 2, callbacks=[SavedAt(1, path)])
    with pytest.raises(MisconfigurationException, match="another ticket"):
        fit(GradualPruning(ticket=ticket), 3, ckpt_path=path)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_run_that_cannot_rank_by_saliency_says_so(optimizer, caplog):
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        fit(GradualPruning(0.5), 1, Model(optimizer=optimizer))
    assert ("ranked by magnitude" in caplog.text) == (optimizer is torch.optim.SGD)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (GradualPruning(which={"no.such": False}), r"'no\.such'.*embedding.*model\.0\.weight"),
        (GradualPruning(which={"*": False}), "nothing to prune"),
        (GradualPruning(score="saliency"), "SGD does not estimate.*score='magnitude'"),
        (
            GradualPruning(ticket=Ticket({"x.weight": torch.ones(2, 2, dtype=bool)}, 0.5)),
            r"x\.weight.*model\.0\.weight",
        ),
        (
            GradualPruning(ticket=Ticket({"model.0.weight": torch.ones(2, 2, dtype=bool)}, 0.5)),
            r"'model\.0\.weight'.*\(2, 2\).*\(16, 6\)",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_rejected(callback, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(callback, 1)
