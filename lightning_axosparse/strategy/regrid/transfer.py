"""Moves tensors, with their optimizer state, to the ranks that keep them in a new grid.

Tensors are sent one at a time, from a rank that has it straight to those that need it: no rank ever
holds more than what it kept, what it is going to keep, and one tensor with its optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.grid import Grid
from lightning_axosparse.pipeline.shard.sharding import ReshardedTensor, Sharding, free
from lightning_axosparse.sparse.module.parameter_state import forget, pack, unpack
from lightning_axosparse.sparse.module.parameters import owners
from lightning_axosparse.support.memory.release import release_freed_memory


class Route(NamedTuple):
    """The rank that sends a tensor, and those that receive it."""

    source: int
    destinations: list[int]


def route(tensor: ReshardedTensor, old: Grid, new: Grid) -> Route:
    """Find the sender and the receivers of a tensor among the ranks given this rank's batches.

    Args:
        tensor: the tensor, with the stages that keep it in both grids.
        old: the present grid.
        new: the next grid, in which the same ranks are given the same batches.
    """
    have = [rank for rank in new.same_batch_ranks if rank % old.g_inter in tensor.before]
    need = [rank for rank in new.same_batch_ranks if rank % new.g_inter in tensor.after]
    return Route(have[0], [rank for rank in need if rank not in have])


class Transfer:
    """Moves a module's tensors from one grid to another.

    Args:
        sharding: which tensors each stage keeps.
        old: the present grid.
        new: the next grid, in which the same ranks are given the same batches.
        optimizers: their state moves with the parameters; their parameter groups stay as they are.
        device: device of this rank.
    """

    def __init__(
        self,
        sharding: Sharding,
        old: Grid,
        new: Grid,
        optimizers: Sequence[Optimizer],
        device: torch.device,
    ) -> None:
        self._sharding, self._old, self._new = sharding, old, new
        self._optimizers, self._device = optimizers, device
        self._owners = owners(sharding.module)

    def run(self, parts: Sequence[range]) -> None:
        """Partition the layers anew, and send every tensor to the ranks that now need it.

        Collective over the ranks that are given the same batches. Gradients of what moves are
        dropped.

        Args:
            parts: the layer indices of each new stage.
        """
        for tensor in self._sharding.reshard(parts, [self._new.stage]):
            source, destinations = route(tensor, self._old, self._new)
            if self._old.rank in destinations:
                received: list[Any] = [None]
                dist.recv_object_list(received, src=source)
                self._fill(tensor, received[0])
            elif self._old.rank == source and destinations:
                packed = self._pack(tensor)
                for rank in destinations:
                    dist.send_object_list([packed], dst=rank)
            if self._new.stage not in tensor.after:
                self._drop(tensor)
        release_freed_memory()

    def _pack(self, moved: ReshardedTensor) -> Any:
        if isinstance(moved.tensor, nn.Parameter):
            return pack(moved.tensor, self._owners[moved.name], self._optimizers)
        return moved.tensor.to("cpu", copy=True)

    def _fill(self, moved: ReshardedTensor, packed: Any) -> None:
        if isinstance(moved.tensor, nn.Parameter):
            owned = self._owners[moved.name]
            unpack(packed, moved.tensor, owned, self._optimizers, self._device)
        else:
            moved.tensor.data = packed.to(self._device)

    def _drop(self, moved: ReshardedTensor) -> None:
        if isinstance(moved.tensor, nn.Parameter):
            forget(moved.tensor, self._owners[moved.name], self._optimizers)
        free(moved.tensor)
