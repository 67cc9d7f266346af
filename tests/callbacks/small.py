"""A small training on one device, for callbacks that prune."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_axosparse.pruning.rule import Stored
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.parameters import layouts
from lightning_axosparse.strategy.strategy import AxoSparseStrategy
from tests.quiet import QUIET


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
    parallel_devices = (torch.device("cpu"),)

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

    def local_parameters(self):
        parameters = list(self.lightning_module.named_parameters())
        return dict(parameters[self.stage :: self.stages])

    def parameter_stages(self):
        names = [name for name, _ in self.lightning_module.named_parameters()]
        return {name: {number % self.stages} for number, name in enumerate(names)}

    def stored_weights(self):
        held, sparse = self.local_parameters(), layouts(self.lightning_module)
        state = self.optimizers[0].state
        return lambda name: Stored(held[name], state[held[name]], sparse.get(name))

    def counted_parameters(self):
        return set(self.local_parameters())

    def sparsify(self, masks, backend):
        optimizer = self.optimizers[0]
        sparsify(self.lightning_module, masks, optimizer, compute=backend.compute)
        self.swaps += 1

    def shrink(self, ticket):
        ticket.apply(self.lightning_module, self.optimizers)

    def use_freed_memory(self):
        self.draws += 1

    def block_backward_sync(self):
        return nullcontext()


AxoSparseStrategy.register(PartialStrategy)


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
        **QUIET,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **options,
    )
    loader = DataLoader(data, batch_size=8)
    trainer.fit(model, loader, loader if validated else None, ckpt_path=ckpt_path)
    return model, trainer


def shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


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
