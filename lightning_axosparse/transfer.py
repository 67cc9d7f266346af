"""Transfer: tensors, with their optimizer state, travel to the ranks that need them in a new grid.

One at a time, straight from a rank that has it to those that will: no rank ever holds more than it
had, what it is to have, and one parcel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_axosparse.grid import Grid
from lightning_axosparse.pipeline.split import Rehoused, Split, empty
from lightning_axosparse.sparse.freed import return_freed_memory
from lightning_axosparse.sparse.parcel import forget, pack, unpack
from lightning_axosparse.sparse.swap import owners


class Route(NamedTuple):
    """The rank that sends a tensor, and those that it is sent to."""

    source: int
    destinations: list[int]


def route(moved: Rehoused, old: Grid, new: Grid) -> Route:
    """Find who sends a tensor to whom among the ranks of this rank's feed.

    Args:
        moved: the tensor.
        old: the grid as it was.
        new: the grid as it shall be, with the same feeds.
    """
    have = [rank for rank in new.fed_alike if rank % old.g_inter in moved.before]
    need = [rank for rank in new.fed_alike if rank % new.g_inter in moved.after]
    return Route(have[0], [rank for rank in need if rank not in have])


class Transfer:
    """The move of a module's tensors from one grid to another.

    Args:
        split: the places of the tensors.
        old: the grid as it was.
        new: the grid as it shall be, with the same feeds.
        optimizers: their state goes along; their parameter groups stay as they are.
        device: device of this rank.
    """

    def __init__(
        self,
        split: Split,
        old: Grid,
        new: Grid,
        optimizers: Sequence[Optimizer],
        device: torch.device,
    ) -> None:
        self._split, self._old, self._new = split, old, new
        self._optimizers, self._device = optimizers, device
        self._owners = owners(split.module)

    def run(self, parts: Sequence[range]) -> None:
        """Deal the layers anew, and send every tensor to the ranks that now need it.

        Collective over the feed. Gradients of what moves are dropped.

        Args:
            parts: the layer indices of each new stage.
        """
        for moved in self._split.redeal(parts, [self._new.stage]):
            source, destinations = route(moved, self._old, self._new)
            if self._old.rank in destinations:
                box: list[Any] = [None]
                dist.recv_object_list(box, src=source)
                self._fill(moved, box[0])
            elif self._old.rank == source and destinations:
                cargo = self._pack(moved)
                for rank in destinations:
                    dist.send_object_list([cargo], dst=rank)
            if self._new.stage not in moved.after:
                self._drop(moved)
        return_freed_memory()

    def _pack(self, moved: Rehoused) -> Any:
        if isinstance(moved.tensor, nn.Parameter):
            return pack(moved.tensor, self._owners[moved.name], self._optimizers)
        return moved.tensor.to("cpu", copy=True)

    def _fill(self, moved: Rehoused, cargo: Any) -> None:
        if isinstance(moved.tensor, nn.Parameter):
            owned = self._owners[moved.name]
            unpack(cargo, moved.tensor, owned, self._optimizers, self._device)
        else:
            moved.tensor.data = cargo.to(self._device)

    def _drop(self, moved: Rehoused) -> None:
        if isinstance(moved.tensor, nn.Parameter):
            forget(moved.tensor, self._owners[moved.name], self._optimizers)
        empty(moved.tensor)
