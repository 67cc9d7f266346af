"""Says what callbacks ask of the strategy that stores pruned weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_axosparse.pruning.channels.ticket import ChannelTicket
from lightning_axosparse.pruning.densities import Stages
from lightning_axosparse.sparse.backend import Backend
from lightning_axosparse.sparse.store.materialize import Policy


class PruningStrategy(Protocol):
    """The part of ``AxoSparseStrategy`` that prunes, and tells who holds which weights."""

    learning_rate_factor: float

    @property
    def inter_group(self) -> dist.ProcessGroup | None:
        """The stages of this rank's pipeline."""

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The replicas of this rank's stage."""

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""

    @property
    def microbatches(self) -> int:
        """Micro-batches of a batch."""

    def held_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank."""

    def counted_parameters(self) -> set[str]:
        """Those that this rank counts, where several stages hold them."""

    def parameter_stages(self) -> Stages:
        """The stages that hold each parameter."""

    def sparsify(self, masks: Mapping[str, Tensor], policy: Policy, backend: Backend) -> None:
        """Store the masked parameters of this rank sparse."""

    def shrink(self, ticket: ChannelTicket) -> None:
        """Remove pruned channels."""

    def use_freed_memory(self) -> None:
        """Choose again what memory decides."""


_ASKED = [name for name in vars(PruningStrategy) if not name.startswith("_")]


def can_prune(trainer: Trainer) -> bool:
    """Whether the Trainer's strategy is one that stores pruned weights."""
    return all(hasattr(type(trainer.strategy), name) for name in _ASKED)


def strategy_of(trainer: Trainer) -> PruningStrategy:
    """The Trainer's strategy, which can prune."""
    return cast(PruningStrategy, trainer.strategy)
