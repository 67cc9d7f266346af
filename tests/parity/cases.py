"""The module, the data and the record of a run that parity tests compare."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_axosparse import AxoSparseStrategy
from tests.accelerator import trainer_devices
from tests.quiet import QUIET

CLASSES, FEATURES, BATCHES, BATCH, EPOCHS = 5, 12, 6, 8, 3


class Net(L.LightningModule):
    """Six layers, two optimizer groups with a scheduler, metrics of every kind of state."""

    def __init__(self, outer: bool = False, tied: bool = False) -> None:
        super().__init__()
        width = 24
        self.model = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Linear(width, CLASSES),
        )
        if tied:
            self.model[4].weight = self.model[2].weight
        self.scale = nn.Parameter(torch.ones(FEATURES)) if outer else None
        self.temperature = nn.Parameter(torch.tensor(1.5)) if outer else None
        self.accuracy = MulticlassAccuracy(CLASSES, average="macro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_auroc = MulticlassAUROC(CLASSES, thresholds=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            x = x * self.scale
        logits = self.model(x)
        return logits if self.temperature is None else logits / self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.accuracy(logits.softmax(-1), y)
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.val_accuracy(logits.softmax(-1), y)
        self.val_auroc(logits.softmax(-1), y)
        self.log_dict({"val_accuracy": self.val_accuracy, "val_auroc": self.val_auroc})

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Plain(Net):
    """The same module with an optimizer that has no state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(seed: int, batches: int = BATCHES, batch: int = BATCH, extra: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    samples = batches * batch + extra
    x = torch.randn(samples, FEATURES, generator=generator)
    y = (x[:, :CLASSES] + 0.3 * torch.randn(samples, CLASSES, generator=generator)).argmax(-1)
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def share(run: L.Trainer, data: Any, batch: int = BATCH) -> DataLoader:
    """This replica's part of every batch, in order: the global batches are those of any grid."""
    alone = {"num_replicas": 1, "rank": 0}
    places: Any = getattr(run.strategy, "distributed_sampler_kwargs", alone)
    sampler = DistributedSampler(data, shuffle=False, **places)
    return DataLoader(data, batch // places["num_replicas"], sampler=sampler)


@dataclass
class Record:
    """What a run did, as plain numbers and CPU tensors."""

    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)
    validated: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


class Recorder(Callback):
    """Fills a record on every rank."""

    def __init__(self) -> None:
        self.record = Record()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.record.losses.append(float(outputs["loss"]))
        self.record.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.record.logged.append({k: float(v) for k, v in trainer.logged_metrics.items()})

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
            self.record.validated.append(metrics)


def trainer(
    strategy: Any = "auto", devices: int = 1, recorder: Recorder | None = None, **options: Any
) -> L.Trainer:
    """A quiet Trainer whose first callback keeps the record."""
    callbacks = [recorder or Recorder(), *options.pop("callbacks", [])]
    settings = {
        **trainer_devices(strategy, devices),
        "max_epochs": EPOCHS,
        **QUIET,
        "use_distributed_sampler": True,
        **options,
    }
    return L.Trainer(strategy=strategy, callbacks=callbacks, **settings)


def fit(run: L.Trainer, module: L.LightningModule, extra: int = 0, **options: Any) -> Record:
    """Train on this module's own data, and return what happened."""
    run.fit(module, loader(1, extra=extra), loader(2, batches=3), **options)
    return recorded(run, module)


def trained(
    make: Callable[[], L.LightningModule],
    strategy: Any,
    devices: int,
    *loaders: DataLoader,
    **options: Any,
) -> Record:
    """Make a module from seed 0, train it in float64, and return what happened."""
    L.seed_everything(0, verbose=False)
    module = make()
    run = trainer(strategy, devices, **{"precision": "64-true", **options})
    run.fit(module, *loaders)
    return recorded(run, module)


def recorded(run: L.Trainer, module: L.LightningModule) -> Record:
    """What happened in a run of :func:`trainer`, with the weights as they are now."""
    record: Record = run.callbacks[0].record
    record.weights = whole_state(run, module)
    record.facts = {"global_step": run.global_step, "epoch": run.current_epoch}
    return record


def whole_state(run: L.Trainer, module: L.LightningModule) -> dict[str, Tensor]:
    """A copy of the state of a whole module after a run, on every rank."""
    strategy = run.strategy
    ours = isinstance(strategy, AxoSparseStrategy)
    with strategy.summon_full_params(rank0_only=False) if ours else nullcontext():
        return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def difference(one: Record, other: Record) -> float:
    """Largest absolute difference of anything recorded."""
    assert len(one.losses) == len(other.losses) > 0
    assert one.rates == other.rates
    assert one.facts == other.facts
    pairs = list(zip(one.losses, other.losses, strict=True))
    for ours, theirs in ((one.logged, other.logged), (one.validated, other.validated)):
        for here, there in zip(ours, theirs, strict=True):
            assert here.keys() == there.keys()
            pairs += [(here[name], there[name]) for name in here]
    assert one.weights.keys() == other.weights.keys()
    tensors = [(one.weights[k].double() - other.weights[k].double()).abs() for k in one.weights]
    return max([abs(a - b) for a, b in pairs] + [float(t.max()) for t in tensors if t.numel()])


def mean_losses(records: Iterable[Record]) -> list[float]:
    """The losses of whole batches: that of a replica is of its part of the batch."""
    return [fmean(losses) for losses in zip(*(record.losses for record in records), strict=True)]


def loaded(*paths: Path) -> list[dict[str, Any]]:
    """What is in checkpoints."""
    return [torch.load(path, weights_only=False) for path in paths]


def free_port() -> int:
    """A port on which nobody listens."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_ddp(devices: int, port: int) -> bool:
    """Let Lightning's ddp take the first ranks of an MPI job for those that torchrun started.

    All ranks call it, and learn whether they are among these.
    """
    from mpi4py import MPI

    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if devices < ranks and dist.is_initialized():
        dist.destroy_process_group()  # that of all ranks, which ddp would take
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(devices),
        LOCAL_WORLD_SIZE=str(devices),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="parity",
    )
    return rank < devices


def own_attributes(callback: Any) -> dict[str, Any]:
    """The attributes of a callback without the methods of the module that Lightning sets."""
    return {name: each for name, each in vars(callback).items() if name not in ("log", "log_dict")}
