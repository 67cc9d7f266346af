"""A stand-in for a pipeline: each rank has the whole module, but the last stage's steps count.

There the step runs once on the whole batch, after runs on its micro-batches, of which nothing
counts. The plain Trainer that each test compares with runs the same module without micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.distributed.process_groups import broadcast
from lightning_axosparse.strategy.compat.logging import StepLog
from lightning_axosparse.strategy.compat.metrics import PipelinedMetrics


@dataclass(frozen=True)
class Groups:
    grid: Grid
    inter: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None

    @property
    def last_rank(self) -> int:
        return self.grid.pipeline[-1]

    @property
    def is_last(self) -> bool:
        return self.grid.stage == self.grid.g_inter - 1

    def from_last_stage(self, value: Any) -> Any:
        if self.inter is None:
            return value
        return broadcast(value, self.last_rank, self.inter)


def alone() -> Groups:
    return Groups(Grid(1, 1))


def connect(g_inter: int) -> Groups:
    """Start torch.distributed (gloo) on the ranks of this MPI job and form its groups."""
    from mpi4py import MPI

    world, host = MPI.COMM_WORLD, "127.0.0.1"
    if world.rank == 0:  # It listens before others know the port, so nobody can take it.
        store = dist.TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
    port = world.bcast(store.port if world.rank == 0 else None)
    if world.rank > 0:
        store = dist.TCPStore(host, port, world.size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    grid = Grid(world.size, g_inter, world.rank)
    inter, _ = dist.new_subgroups_by_enumeration(grid.ranks_by(lambda g: g.pipeline_index))
    data, _ = dist.new_subgroups_by_enumeration(grid.ranks_by(lambda g: g.stage))
    return Groups(grid, inter if g_inter > 1 else None, data if grid.g_data > 1 else None)


class CutStrategy(ParallelStrategy):
    """Runs each step on micro-batches, and once on the batch where this rank has the last stage."""

    def __init__(self, microbatches: int, groups: Groups) -> None:
        super().__init__(cluster_environment=LightningEnvironment())
        self.microbatches = microbatches
        self.groups = groups

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def is_distributed(self) -> bool:
        return self.groups.data is not None

    @property
    def is_global_zero(self) -> bool:
        return self.groups.grid.rank == 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.groups.grid.g_data, "rank": self.groups.grid.replica}

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        groups, module = self.groups, self.lightning_module
        self.log = StepLog(module)
        self.metrics = PipelinedMetrics(module, groups.data, groups.from_last_stage, groups.is_last)
        self.metrics.attach()

    def teardown(self) -> None:
        if "metrics" in vars(self):
            self.metrics.detach()
        super().teardown()

    def run(self, step: Callable[..., Any], batch: Any, *args: Any) -> torch.Tensor:
        parts = [part.tensor_split(min(self.microbatches, len(part))) for part in batch]
        with self.log.ignored(), self.metrics.skipped():
            for microbatch in zip(*parts, strict=True):
                step(microbatch, *args)
        loss = torch.zeros((), requires_grad=True)
        if self.groups.is_last:
            with self.log.recorded(), self.metrics.counted():
                loss = step(batch, *args)
        self.log.replay(self.groups.from_last_stage(self.log.calls))
        return loss

    def training_step(self, *args: Any) -> torch.Tensor:
        return self.run(self.lightning_module.training_step, *args)

    def validation_step(self, *args: Any) -> torch.Tensor:
        return self.run(self.lightning_module.validation_step, *args)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.groups.data is None:
            return tensor
        values = [torch.empty_like(tensor) for _ in range(self.groups.grid.g_data)]
        dist.all_gather(values, tensor, group=self.groups.data)
        return getattr(torch, str(reduce_op))(torch.stack(values).double()).to(tensor.dtype)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self, name: str | None = None) -> None:
        pass

    def model_to_device(self) -> None:
        pass


class ListLogger(Logger):
    name, version = "list", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "at": step})

    def log_hyperparams(self, *args: Any) -> None:
        pass


class History(Callback):
    """Everything that callbacks, loggers and the progress bar could see, at every moment."""

    def __init__(self) -> None:
        self.moments: list[tuple[str, dict[str, float]]] = []

    def _see(self, moment: str, trainer: Trainer) -> None:
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            seen = {name: float(value) for name, value in getattr(trainer, kind).items()}
            self.moments.append((f"{moment}.{kind}", seen))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._see("train_batch", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("train_epoch", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._see("val_batch", trainer)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("val_epoch", trainer)

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._see("fit", trainer)


def fit(module: LightningModule, strategy: Any, callbacks: Any = (), **options: Any) -> History:
    """Train briefly and return what was seen, the logger's rows among it."""
    history, logger = History(), ListLogger()
    options = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        callbacks=[history, *callbacks],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    trainer.fit(module)
    history.moments += [("logger", row) for row in logger.rows]
    return history


def assert_same(
    ours: list[tuple[str, dict[str, float]]],
    theirs: list[tuple[str, dict[str, float]]],
    relative: float = 2e-6,
) -> None:
    assert [moment for moment, _ in ours] == [moment for moment, _ in theirs]
    for (moment, mine), (_, reference) in zip(ours, theirs, strict=True):
        assert mine.keys() == reference.keys(), moment
        for name, value in reference.items():
            assert mine[name] == pytest.approx(value, rel=relative, abs=1e-12, nan_ok=True), (
                moment,
                name,
            )
