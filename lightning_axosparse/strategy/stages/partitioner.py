"""Finds which layers each stage computes, and which tensors it keeps, before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_axosparse.pipeline.shard.partition import (
    UNPARTITIONED,
    Partition,
    called_in_order,
    order_of_example,
    partition_layers,
)
from lightning_axosparse.pipeline.shard.sharded_module import (
    allocate,
    is_left_sharded,
    load_values,
)
from lightning_axosparse.pipeline.shard.sharding import Sharding
from lightning_axosparse.pruning.ticket import Ticket
from lightning_axosparse.sparse import sparsify
from lightning_axosparse.sparse.module.optimizer_state import dense_shapes
from lightning_axosparse.strategy.compat.internals import callbacks_of, overrides, trainer_of
from lightning_axosparse.strategy.compat.loaders import first_step
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.strategy.validation import validate_layers


@runtime_checkable
class PrunesByTicket(Protocol):
    """A callback that prunes the weights by a ticket when fit starts, if it has one then."""

    prunes_at_start: Literal[True]
    ticket: Ticket | None


class Partitioner:
    """Partitions the layers of a module over the stages of a grid."""

    def __init__(self, config: Config, ranks: MPIStrategy, module: LightningModule) -> None:
        self.module, self._config, self._ranks = module, config, ranks

    @property
    def stages(self) -> range:
        """The stages of this rank."""
        stage = self._ranks.grid.stage
        is_alone = self._config.transport == "loopback"
        return range(self._config.g_inter) if is_alone else range(stage, stage + 1)

    @property
    def are_divided(self) -> bool:
        """Whether other ranks have stages of their own."""
        return len(self.stages) < self._config.g_inter

    def partition(self) -> Partition:
        """Partition the layers, by parameters; collective where batches show their order."""
        config, module = self._config, self.module
        partition = UNPARTITIONED
        if config.g_inter > 1 or config.recompute is not None:
            sizes = None if isinstance(config.balance, str) else config.balance
            # Of layers on other ranks only the dense shapes are known.
            in_part = is_left_sharded(module) or self._adopted is not None
            with dense_shapes(module) if in_part else nullcontext():
                partition = partition_layers(
                    module, config.pipeline, sizes, config.g_inter, self._call_order
                )
        if config.parts > 1:
            validate_layers(partition)
        return partition

    def split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors that this rank keeps, and those that other ranks' stages alone have."""
        partition = self.partition()
        return Sharding(self.module, partition.names, partition.parts).split(self.stages)

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load what this rank is going to keep of a whole module's state."""
        kept, others = self.split()
        allocate(kept.values())
        load_values(self.module, state, strict, others.values())

    def make_sparse(self, make: Callable[[Tensor], None]) -> None:
        """Store sparse, each as soon as it is made, what an adopted ticket prunes of this stage."""
        ticket = self._adopted
        if ticket is None:
            return
        kept, _ = self.split()
        for name, mask in ticket.part(kept).items():
            if mask.shape == kept[name].shape and self._keeps_dtype(kept[name].dtype):
                make(kept[name])
                sparsify(self.module, {name: mask})

    @property
    def _adopted(self) -> Ticket | None:
        """The ticket that a callback has before the layers are made in ``configure_model``."""
        trainer = trainer_of(self.module)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        if not overrides(self.module, "configure_model"):
            return None
        pruning = (each for each in callbacks_of(trainer) if isinstance(each, PrunesByTicket))
        return next((each.ticket for each in pruning if each.ticket is not None), None)

    def _keeps_dtype(self, dtype: torch.dtype) -> bool:
        """Whether the precision leaves parameters of this dtype as they are."""
        probe = nn.ParameterList([torch.empty(0, dtype=dtype)])
        converted = self._ranks.precision_plugin.convert_module(probe)
        return next(converted.parameters()).dtype == dtype

    def _call_order(self, module: nn.Module, layers: Mapping[str, str]) -> list[str]:
        """The order in which the module's example or else a first step calls layers; collective."""
        order, trainer = order_of_example(module, layers), trainer_of(self.module)
        if order or trainer is None:
            return order
        step = first_step(trainer)
        if step is not None:
            step = step._replace(context=self._ranks.precision_plugin.forward_context)
            order = called_in_order(module, layers, step)
        return self._ranks.broadcast(order)
