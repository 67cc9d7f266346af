from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse.callbacks.early_bird import EarlyBirdTicket
from lightning_axosparse.pruning import Ticket
from lightning_axosparse.sparse import sparsify
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

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), self.lr)


class PartialStrategy(SingleDeviceStrategy):
    """Trains on one device; reports every ``stages``-th parameter as those on this rank."""

    microbatches = 1

    def __init__(self, stages=1, stage=0, inter_group=None, data_group=None):
        super().__init__(torch.device("cpu"))
        self.stages, self.stage = stages, stage
        self.inter_group_, self.data_group_ = inter_group, data_group
        self.swaps = 0

    @property
    def inter_group(self):
        return self.inter_group_

    @property
    def data_group(self):
        return self.data_group_

    def held_parameters(self):
        parameters = list(self.lightning_module.named_parameters())
        return dict(parameters[self.stage :: self.stages])

    def counted_parameters(self):
        return set(self.held_parameters())

    def sparsify(self, masks, policy, compute):
        optimizer = self.optimizers[0]
        sparsify(self.lightning_module, masks, optimizer, policy=policy, compute=compute)
        self.swaps += 1


def seeded_model(**settings):
    seed_everything(1, verbose=False)
    return Model(**settings)


def fit(callback, epochs, model=None, strategy=None, ckpt_path=None, folder=None, callbacks=()):
    """Train a small model; return it with its trainer."""
    model = model or seeded_model()
    seed_everything(2, verbose=False)
    data = TensorDataset(torch.randn(32, 6), torch.randn(32, 2))
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
    )
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=ckpt_path)
    return model, trainer


def search(**settings):
    return EarlyBirdTicket(**{"pruning_ratio": 0.5, "window": 3, "threshold": 0.1, **settings})


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pruning_ratio": 1.0}, "pruning_ratio=1.0"),
        ({"pruning_ratio": 0.0}, "pruning_ratio=0.0"),
        ({"scope": "model"}, "scope='model'"),
        ({"distance": "jaccard"}, "distance='jaccard'"),
        ({"threshold": 0.0}, "threshold=0.0"),
        ({"window": 1}, "window=1"),
        ({"draw_by_epoch": 0}, "draw_by_epoch=0"),
        ({"pruning_ratio": "0.8"}, "pruning_ratio='0.8'"),
        ({"threshold": None}, "threshold=None"),
        ({"window": 2.5}, "window=2.5"),
        ({"draw_by_epoch": "2"}, "draw_by_epoch='2'"),
        ({"exclude": "head.*"}, r"\['head\.\*'\]"),
        ({"ticket": {}}, "ticket={}"),
        ({"policy": "dense"}, "policy='dense'.*samo"),
        ({"compute": "fast"}, "compute='fast'.*'sparse'"),
        ({"compute": "sparse", "policy": "samo"}, 'policy="samo" keeps dense weights'),
    ],
)
def test_arguments_out_of_range_are_rejected(settings, message):
    with pytest.raises(MisconfigurationException, match=message):
        EarlyBirdTicket(**settings)


def test_the_ticket_is_drawn_when_the_window_is_full_and_the_masks_have_settled():
    callback = search()
    model, trainer = fit(callback, 6, seeded_model(lr=0.0))
    assert callback.ticket.epoch == 2
    assert callback.ticket.step == 12
    assert callback.ticket.distances == (0.0, 0.0)
    assert callback.distances == [0.0, 0.0]
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
    with pytest.warns(UserWarning, match=r"No ticket.*5 epochs.*draw_by_epoch"):
        model, _ = fit(callback, 5, seeded_model(lr=0.1), callbacks=[Recorder()])
    assert callback.ticket is None
    assert len(callback.distances) == 4
    assert max(callback.distances) > 0
    assert seen == [pytest.approx(callback.distances[-1])]
    assert shapes(model)["model.0.weight"] == (16, 6)


@pytest.mark.parametrize("epoch", [1, 4])
def test_draw_by_epoch(epoch):
    callback = search(threshold=1e-6, draw_by_epoch=epoch)
    fit(callback, 5, seeded_model(lr=0.1))
    assert callback.ticket.epoch == epoch - 1
    assert len(callback.ticket.distances) == epoch - 1


def test_training_goes_on_with_the_kept_weights():
    model, trainer = fit(search(draw_by_epoch=2), 4, seeded_model(lr=0.1))
    assert trainer.global_step == 16
    weight = model.state_dict()["model.0.weight"]
    mask = trainer.callbacks[0].ticket.masks["model.0.weight"]
    assert weight.shape == (16, 6)
    assert not weight[~mask].any()
    assert weight[mask].all()


def test_layer_scope_hamming_distance_and_exclusion():
    callback = search(scope="layer", distance="hamming", exclude=["model.3.*"])
    fit(callback, 3, seeded_model(lr=0.0))
    assert callback.ticket.layer_sparsity() == {"model.0.weight": 0.5, "model.4.weight": 0.5}
    assert (callback.ticket.scope, callback.ticket.distance) == ("layer", "hamming")


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
    settings = {"threshold": 0.02, "draw_by_epoch": 4}
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
    settings = {"threshold": 0.02, "draw_by_epoch": 4}
    whole, resumed = search(**settings), search(**settings)
    path = tmp_path / "a.ckpt"
    expected, _ = fit(whole, 6, callbacks=[SavedAfterStep(saved_at, path)])
    checkpoint = torch.load(path, weights_only=True)
    assert (checkpoint["callbacks"]["EarlyBirdTicket"]["ticket"] is not None) == (saved_at > 16)
    model, trainer = fit(resumed, 6, ckpt_path=path)
    assert (whole.ticket.epoch, whole.ticket.step) == (3, 16)
    assert resumed.ticket == whole.ticket
    assert resumed.distances == whole.distances
    assert trainer.strategy.swaps == 1
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_a_checkpoint_with_another_ticket_is_rejected(ticket, tmp_path):
    path = tmp_path / "a.ckpt"
    fit(search(draw_by_epoch=1), 2, callbacks=[SavedAt(1, path)])
    with pytest.raises(MisconfigurationException, match="another ticket"):
        fit(EarlyBirdTicket(ticket=ticket), 3, ckpt_path=path)


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (EarlyBirdTicket(exclude=["no.such"]), r"'no\.such'.*model\.0\.weight"),
        (EarlyBirdTicket(exclude=["*"]), "nothing to prune"),
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

    from lightning_axosparse.distributed.mpi.backend import init_process_group

    init_process_group("cpu")
    rank, world = dist.get_rank(), dist.group.WORLD
    staged = search(threshold=0.02, draw_by_epoch=4)
    saved = SavedAt(1, f"{folder}/{rank}.ckpt")
    fit(staged, 5, strategy=PartialStrategy(2, rank, inter_group=world), callbacks=[saved])
    replicated, model = search(draw_by_epoch=2), seeded_model()
    with torch.no_grad():
        model.model[0].weight.mul_(1 + rank)  # replicas that differ must still agree
    fit(replicated, 3, model, strategy=PartialStrategy(data_group=world))
    dist.destroy_process_group()
    return staged, replicated


def test_stages_and_replicas_draw_one_ticket(tmp_path):
    alone = search(threshold=0.02, draw_by_epoch=4)
    fit(alone, 5)
    replica = search(draw_by_epoch=2)
    fit(replica, 3)
    for staged, replicated in run_ranks(2, on_two_stages_and_two_replicas, str(tmp_path)):
        assert staged.ticket == alone.ticket
        assert staged.distances == alone.distances
        assert replicated.ticket == replica.ticket
    resumed = search(threshold=0.02, draw_by_epoch=4)
    fit(resumed, 5, ckpt_path=tmp_path / "0.ckpt")
    assert resumed.ticket == alone.ticket
    assert resumed.distances == alone.distances
