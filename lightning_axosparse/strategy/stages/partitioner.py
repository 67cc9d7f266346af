"""Assigns layers and tensors to stages before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import LightningModule, Trainer
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
from lightning_axosparse.sparse.module.convert import densify_for
from lightning_axosparse.sparse.module.optimizer_state import dense_shapes
from lightning_axosparse.strategy.compat.internals import callbacks_of, overrides, trainer_of
from lightning_axosparse.strategy.compat.loaders import first_step
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.strategy.validation import validate_layers


@runtime_checkable
class PrunesByTicket(Protocol):
    """A callback that prunes by a ticket when fit starts, if it was given one."""

    prunes_at_start: Literal[True]
    ticket: Ticket | None


def starting_ticket(trainer: Trainer) -> Ticket | None:
    """Return the ticket by which a callback prunes when fit starts; None if there is none."""
    pruning = (each for each in callbacks_of(trainer) if isinstance(each, PrunesByTicket))
    return next((each.ticket for each in pruning if each.ticket is not None), None)


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
    def is_distributed(self) -> bool:
        """Whether the stages are those of several ranks."""
        return len(self.stages) < self._config.g_inter

    def partition(self) -> Partition:
        """Partition the layers by parameters; collective if the order follows from a batch."""
        config, module = self._config, self.module
        partition = UNPARTITIONED
        if config.g_inter > 1 or config.recompute is not None:
            sizes = None if isinstance(config.balance, str) else config.balance
            # All ranks count dense shapes, as a rank has sparse weights of its own layers only.
            is_sharded = is_left_sharded(module) or self._adopted_ticket is not None
            with dense_shapes(module) if is_sharded else nullcontext():
                partition = partition_layers(
                    module, config.pipeline, sizes, config.g_inter, self._call_order
                )
        if config.microbatch_count > 1:
            validate_layers(partition)
        return partition

    def split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors that this rank stores, and those that only other ranks store."""
        partition = self.partition()
        return Sharding(self.module, partition.names, partition.parts).split(self.stages)

    def load(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load this rank's tensors from the state of the full module."""
        densify_for(self.module, state, self._ranks.optimizers)
        local, others = self.split()
        allocate(local.values())
        load_values(self.module, state, strict, others.values())

    def sparsify_adopted(self, write: Callable[[Tensor], None]) -> None:
        """Sparsify the weights of this stage that an adopted ticket prunes.

        Args:
            write: writes the values of a deferred tensor, each just before it is sparsified.
        """
        ticket = self._adopted_ticket
        if ticket is None:
            return
        local, _ = self.split()
        for name, mask in ticket.part(local).items():
            if mask.shape == local[name].shape and self._precision_keeps(local[name].dtype):
                write(local[name])
                sparsify(self.module, {name: mask})

    @property
    def _adopted_ticket(self) -> Ticket | None:
        """The ticket that was given to a callback, if ``configure_model`` creates the layers."""
        trainer = trainer_of(self.module)
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return None
        if not overrides(self.module, "configure_model"):
            return None
        return starting_ticket(trainer)

    def _precision_keeps(self, dtype: torch.dtype) -> bool:
        """Whether the precision plugin does not convert parameters of this dtype."""
        probe = nn.ParameterList([torch.empty(0, dtype=dtype)])
        converted = self._ranks.precision_plugin.convert_module(probe)
        return next(converted.parameters()).dtype == dtype

    def _call_order(self, module: nn.Module, layers: Mapping[str, str]) -> list[str]:
        """Find the order of layers by the module's example, or else by a first step; collective."""
        order, trainer = order_of_example(module, layers), trainer_of(self.module)
        if order or trainer is None:
            return order
        step = first_step(trainer)
        if step is not None:
            step = step._replace(context=self._ranks.precision_plugin.forward_context)
            order = called_in_order(module, layers, step)
        return self._ranks.broadcast(order)
