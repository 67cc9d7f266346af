from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.pruning import Ticket
from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.parameters import layouts
from tests.ranks import run_ranks


class Model(LightningModule):
    def __init__(self, lr=0.1, optimizer=torch.optim.SGD):
        super().__init__()
        self.lr, self.optimizer = lr, optimizer
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 2)
        )

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), self.lr)


class PartialStrategy(SingleDeviceStrategy):
    """Trains on one device; reports every ``stages``-th parameter as those on this rank."""

    microbatches = 1

    def __init__(self, stages=1, stage=0, inter_group=None, data_group=None):
        super().__init__(torch.device("cpu"))
        self.stages, self.stage = stages, stage
        self.inter_group_, self.data_group_ = inter_group, data_group
        self.swaps = self.draws = 0

    @property
    def world_group(self):
        return dist.group.WORLD if self.inter_group_ or self.data_group_ else None

    @property
    def inter_group(self):
        return self.inter_group_

    @property
    def data_group(self):
        return self.data_group_

    def held_parameters(self):
        parameters = list(self.lightning_module.named_parameters())
        return dict(parameters[self.stage :: self.stages])

    def parameter_stages(self):
        names = [name for name, _ in self.lightning_module.named_parameters()]
        return {name: {number % self.stages} for number, name in enumerate(names)}

    def stored_weights(self):
        held, sparse = self.held_parameters(), layouts(self.lightning_module)
        state = self.optimizers[0].state
        return lambda name: Stored(held[name], state[held[name]], sparse.get(name))

    def counted_parameters(self):
        return set(self.held_parameters())

    def sparsify(self, masks, policy, backend):
        optimizer = self.optimizers[0]
        sparsify(self.lightning_module, masks, optimizer, policy=policy, compute=backend.compute)
        self.swaps += 1

    def shrink(self, ticket):
        ticket.apply(self.lightning_module, self.optimizers)

    def use_freed_memory(self):
        self.draws += 1


def seeded_model(**settings):
    seed_everything(1, verbose=False)
    return Model(**settings)


def fit(
    callback,
    epochs,
    model=None,
    strategy=None,
    ckpt_path=None,
    folder=None,
    callbacks=(),
    validated=False,
    same_batches=False,
    **options,
):
    """Train a small model; return it with its trainer."""
    model = model or seeded_model()
    seed_everything(2, verbose=False)
    inputs, targets = torch.randn(32, 6), torch.randn(32, 2)
    if same_batches:
        inputs, targets = inputs[:8].repeat(4, 1), targets[:8].repeat(4, 1)
    data = TensorDataset(inputs, targets)
    trainer = Trainer(
        max_epochs=epochs,
        strategy=strategy or PartialStrategy(),
        callbacks=[callback, *callbacks],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    loader = DataLoader(data, batch_size=8)
    trainer.fit(model, loader, loader if validated else None, ckpt_path=ckpt_path)
    return model, trainer


def search(**settings):
    by_epochs = {"every": "1 epoch", "draw_after": None, "draw_by": None}
    small = {"pruning_ratio": 0.5, "window": 3, "threshold": 0.1, "method": "early-bird"}
    return EarlyBirdTicket(**{**by_epochs, **small, **settings})


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pruning_ratio": 1.0}, "pruning_ratio=1.0"),
        ({"pruning_ratio": 0.0}, "pruning_ratio=0.0"),
        ({"distance": "jaccard"}, "distance='jaccard'"),
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"window": 1}, "window=1"),
        ({"draw_by": 0}, "draw_by=0"),
        ({"pruning_ratio": "0.8"}, "pruning_ratio='0.8'"),
        ({"threshold": None}, "threshold=None"),
        ({"window": 2.5}, "window=2.5"),
        ({"draw_by": "2"}, "draw_by='2'.*'3 epochs'"),
        ({"prune": "head.*"}, "prune='head"),
        ({"score": "lamp"}, "score='lamp'.*saliency"),
        ({"floor": 1.5}, "floor=1.5"),
        ({"ticket": {}}, "ticket={}"),
        ({"compute": "fast"}, "compute='fast'.*'sparse'.*'samo'"),
        ({"method": "rigl"}, "method='rigl'.*gradual"),
        ({"draw_by": None}, "draw_by=None with method='gradual'.*share"),
        ({"every": "1 epoch"}, "every='1 epoch' with method='gradual'"),
        ({"draw_after": 0.9, "draw_by": 0.5}, r"draw_by=0\.5 must come after draw_after=0\.9"),
    ],
)
def test_arguments_out_of_range_are_rejected(settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        EarlyBirdTicket(**settings)


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
        ({"every": 3, "threshold": 1.0, "draw_after": 0.45}, [6, 9]),
        ({"every": 3, "threshold": 1.0, "draw_after": "3 epochs"}, [6, 9, 12]),
        ({"every": 1 / 32, "threshold": 1.0}, [2, 3]),
    ],
)
@pytest.mark.filterwarnings("ignore:No ticket")
def test_masks_are_compared_and_drawn_when_it_is_time(settings, steps):
    callback = search(**{"threshold": 1e-6, "draw_after": 0.05, **settings})
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


def test_by_default_a_run_of_any_length_prunes_from_a_quarter_to_nine_tenths_of_it():
    for ratio in (0.3, 0.98):
        for epochs in (5, 40):
            callback, strategy = EarlyBirdTicket(ratio), PartialStrategy()
            model, _ = fit(callback, epochs, seeded_model(lr=0.1), strategy)
            assert callback.ticket.step == callback.drawn_at == round(0.9 * 4 * epochs)
            assert callback.ticket.pruning_ratio == ratio
            # As often as once a 32nd, or once a step.
            assert strategy.swaps == (13 if epochs == 5 else 21)
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

    callback = EarlyBirdTicket(0.5, every=4, draw_after=8, draw_by=24)
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


@pytest.mark.parametrize("when", ["every", "draw_after", "draw_by"])
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


def test_training_goes_on_with_the_kept_weights():
    model, trainer = fit(search(draw_by="2 epochs"), 4, seeded_model(lr=0.1))
    assert trainer.global_step == 16
    weight = model.state_dict()["model.0.weight"]
    mask = trainer.callbacks[0].ticket.masks["model.0.weight"]
    assert weight.shape == (16, 6)
    assert not weight[~mask].any()
    assert weight[mask].all()


def test_the_highest_floor_hamming_distance_and_exclusion():
    callback = search(floor=1.0, distance="hamming", prune={"model.3.*": False})
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


@pytest.fixture
def ticket():
    masks = {"model.0.weight": torch.rand(16, 6) < 0.3, "model.4.weight": torch.rand(2, 8) < 0.3}
    return Ticket(masks, 0.7)


def test_a_ticket_or_its_file_is_adopted_when_fit_starts(ticket, tmp_path):
    ticket.save(tmp_path / "a.ticket")
    for source in (ticket, tmp_path / "a.ticket", str(tmp_path / "a.ticket")):
        callback = EarlyBirdTicket(ticket=source)
        model, trainer = fit(callback, 1)
        assert callback.ticket == ticket
        assert trainer.strategy.swaps == 1
        assert shapes(model)["model.0.weight"] == (int(ticket.masks["model.0.weight"].sum()),)
        fit(callback, 1, model)  # again, with the weights sparse already


def test_a_ticket_of_another_shape_is_rejected_where_the_weights_are_sparse_already(ticket):
    model, _ = fit(EarlyBirdTicket(ticket=ticket), 1)
    other = Ticket({"model.0.weight": torch.ones(16, 5, dtype=bool)}, 0.5)
    with pytest.raises(MisconfigurationException, match=r"\(16, 5\).*\(16, 6\)"):
        fit(EarlyBirdTicket(ticket=other), 1, model)


class SavedAt(Callback):
    def __init__(self, epoch, path):
        self.epoch, self.path = epoch, path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


class SavedAfterStep(SavedAt):
    """As ``ModelCheckpoint(every_n_train_steps=...)`` does."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == self.epoch:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, pl_module):
        pass


@pytest.mark.parametrize("saved_at", [0, 1, 2, 3, 4])
def test_a_resumed_run_draws_the_same_ticket(saved_at, tmp_path):
    settings = {"threshold": 0.02, "draw_by": "4 epochs"}
    whole, resumed = search(**settings), search(**settings)
    path = tmp_path / "a.ckpt"
    expected, _ = fit(whole, 6, callbacks=[SavedAt(saved_at, path)])
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["callbacks"]["EarlyBirdTicket"]["ticket"] is not None) == (saved_at >= 3)
    model, trainer = fit(resumed, 6, ckpt_path=path)
    assert resumed.ticket == whole.ticket
    assert resumed.distances == whole.distances
    assert trainer.strategy.swaps == 1
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


@pytest.mark.parametrize("saved_at", [4, 8, 12, 16, 20])
def test_a_run_resumed_from_the_last_batch_of_an_epoch_draws_the_same_ticket(saved_at, tmp_path):
    settings = {"threshold": 0.02, "draw_by": "4 epochs"}
    whole, resumed = search(**settings), search(**settings)
    path = tmp_path / "a.ckpt"
    expected, _ = fit(whole, 6, callbacks=[SavedAfterStep(saved_at, path)])
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["callbacks"]["EarlyBirdTicket"]["ticket"] is not None) == (saved_at > 16)
    model, trainer = fit(resumed, 6, ckpt_path=path)
    assert whole.ticket.step == 16
    assert resumed.ticket == whole.ticket
    assert resumed.distances == whole.distances
    assert trainer.strategy.swaps == 1
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.parametrize("saved_at", [2, 3, 5, 6, 8, 9])
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


def test_a_checkpoint_with_another_ticket_is_rejected(ticket, tmp_path):
    path = tmp_path / "a.ckpt"
    fit(search(draw_by="1 epoch"), 2, callbacks=[SavedAt(1, path)])
    with pytest.raises(MisconfigurationException, match="another ticket"):
        fit(EarlyBirdTicket(ticket=ticket), 3, ckpt_path=path)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (EarlyBirdTicket(prune={"no.such": False}), r"'no\.such'.*embedding.*model\.0\.weight"),
        (EarlyBirdTicket(prune={"*": False}), "nothing to prune"),
        (EarlyBirdTicket(score="saliency"), "SGD does not estimate.*score='magnitude'"),
        (
            EarlyBirdTicket(ticket=Ticket({"x.weight": torch.ones(2, 2, dtype=bool)}, 0.5)),
            r"x\.weight.*model\.0\.weight",
        ),
        (
            EarlyBirdTicket(ticket=Ticket({"model.0.weight": torch.ones(2, 2, dtype=bool)}, 0.5)),
            r"'model\.0\.weight'.*\(2, 2\).*\(16, 6\)",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_rejected(callback, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(callback, 1)


def test_other_strategies_are_rejected():
    with pytest.raises(MisconfigurationException, match=r"axosparse.*SingleDeviceStrategy"):
        fit(search(), 1, strategy=SingleDeviceStrategy(torch.device("cpu")))


def test_callbacks_with_dense_weights_of_their_own_are_rejected():
    with pytest.raises(MisconfigurationException, match="WeightAveraging keeps dense weights"):
        fit(search(), 1, callbacks=[WeightAveraging()])


def test_matrix_optimizers_are_rejected_when_fit_starts():
    model = seeded_model(optimizer=torch.optim.Adafactor)
    with pytest.raises(MisconfigurationException, match="Adafactor cannot"):
        fit(search(), 1, model)
    assert shapes(model)["model.0.weight"] == (16, 6)


def on_two_stages_and_two_replicas(folder):
    import torch.distributed as dist

    from lightning_axosparse.distributed.mpi.process_group import init_process_group

    init_process_group("cpu")
    rank, world = dist.get_rank(), dist.group.WORLD
    staged = search(threshold=0.02, draw_by="4 epochs")
    saved = SavedAt(1, f"{folder}/{rank}.ckpt")
    fit(staged, 5, strategy=PartialStrategy(2, rank, inter_group=world), callbacks=[saved])
    replicated, model = search(draw_by="2 epochs"), seeded_model()
    with torch.no_grad():
        model.model[0].weight.mul_(1 + rank)  # replicas that differ must still agree
    fit(replicated, 3, model, strategy=PartialStrategy(data_group=world))
    dist.destroy_process_group()
    return staged, replicated


def test_stages_and_replicas_draw_one_ticket(tmp_path):
    alone = search(threshold=0.02, draw_by="4 epochs")
    fit(alone, 5)
    replica = search(draw_by="2 epochs")
    fit(replica, 3)
    for staged, replicated in run_ranks(2, on_two_stages_and_two_replicas, str(tmp_path)):
        assert staged.ticket == alone.ticket
        assert staged.distances == alone.distances
        assert replicated.ticket == replica.ticket
    resumed = search(threshold=0.02, draw_by="4 epochs")
    fit(resumed, 5, ckpt_path=tmp_path / "0.ckpt")
    assert resumed.ticket == alone.ticket
    assert resumed.distances == alone.distances
