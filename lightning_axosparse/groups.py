"""Groups: the process groups of a grid, and objects passed along them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_axosparse.grid import Grid

T = TypeVar("T")


class Groups:
    """The process groups of this rank; a group of one rank is None.

    Creating it is collective over the job. ``torch.distributed`` has to be initialised where the
    grid has more than one rank.

    Args:
        grid: the grid of ranks, with this rank.
        device_type: "cpu" or "cuda".

    Attributes:
        world: all ranks.
        inter: the stages of this pipeline.
        data: this stage in all replicas.
        feed: the ranks that are given the same batches; ``inter`` where replicas do not share them.
        feeds: the ranks at this one's place in all feeds; ``data`` where replicas do not share.
        sharers: this stage in the replicas that are given the same batches.
        logged: the same ranks as ``feeds`` apart from all other traffic, for values that the user
            logs on some of them only.
    """

    def __init__(self, grid: Grid, device_type: str) -> None:
        self.grid = grid
        self.mesh: DeviceMesh | None = None
        self.world = self.inter = self.data = self.feed = self.feeds = None
        self.sharers = self.logged = None
        if grid.world_size == 1:
            return
        self.mesh = _mesh(device_type, grid.g_data, grid.g_inter)
        self.world = dist.group.WORLD
        self.inter, self.data = _groups(self.mesh)
        feed_ranks = grid.world_size // grid.feeds
        self.feed, self.feeds = _groups(_mesh(device_type, grid.feeds, feed_ranks))
        if grid.sharing > 1:
            everybody = [replace(grid, rank=rank) for rank in range(grid.world_size)]
            for ranks in sorted({tuple(other.sharers(other.stage)) for other in everybody}):
                group = _group(ranks)
                self.sharers = group if grid.rank in ranks else self.sharers
        self.logged = _logged(grid.feeds, feed_ranks)
        self._meeting = _meeting()

    def share(self, sets: Iterable[frozenset[int]]) -> None:
        """Make groups for the sets of stages that hold parameters in common; collective."""
        for stages in sorted(set(sets), key=sorted):
            if len(stages) > 1:
                _group(tuple(self.grid.ranks_holding(stages)))

    def holding(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        """The ranks that hold what lives on ``stages``, of which this rank's is one."""
        if len(stages) == 1:
            return self.data
        return _group(tuple(self.grid.ranks_holding(stages)))

    def broadcast_along_pipeline(self, value: T, stage: int) -> T:
        """Hand every stage of this pipeline the ``value`` of ``stage``."""
        if self.inter is None:
            return value
        return _broadcast(value, self.grid.pipeline(self.grid.replica)[stage], self.inter)

    def broadcast_to_feed(self, value: T, stage: int) -> T:
        """Hand all ranks given this batch the ``value`` of ``stage`` of its first replica."""
        if self.feed is None:
            return value
        return _broadcast(value, self.grid.sharers(stage)[0], self.feed)

    def collect(self, value: T, stage: int) -> list[T]:
        """The values of ``stage`` in the replicas that share this batch, on all their ranks."""
        if self.feed is None:
            return [value]
        return [_broadcast(value, rank, self.feed) for rank in self.grid.sharers(stage)]

    def gather_shares(self, value: T, stage: int) -> list[T]:
        """The values of the replicas that share a batch, on the first of them; elsewhere none.

        To be called by the ranks of ``stage`` alone.
        """
        first, *others = self.grid.sharers(stage)
        if self.grid.rank != first:
            dist.send_object_list([value], dst=first)
            return []
        values = [value]
        for rank in others:
            box: list[Any] = [None]
            dist.recv_object_list(box, src=rank)
            values += box
        return values

    def broadcast(self, value: T, rank: int) -> T:
        """Hand every rank of the job the ``value`` of ``rank``."""
        return value if self.world is None else _broadcast(value, rank, self.world)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks of the job, in rank order, on every rank."""
        if self.world is None:
            return [value]
        values = [value] * self.grid.world_size
        dist.all_gather_object(values, value, group=self.world)
        return values

    def meet(self, value: T) -> list[T]:
        """The same as :meth:`gather`, and never mistaken for any other collective."""
        values = [value] * self.grid.world_size
        dist.all_gather_object(values, value, group=self._meeting)
        return values

    def gather_to_first_stage(self, value: T) -> list[T]:
        """The values of this pipeline's stages, on its first stage; an empty list elsewhere."""
        if self.inter is None:
            return [value]
        first = self.grid.pipeline(self.grid.replica)[0]
        values: list[Any] | None = [None] * self.grid.g_inter if self.grid.stage == 0 else None
        dist.gather_object(value, values, dst=first, group=self.inter)
        return values or []


# Groups are kept for the next run of the same grid: a backend has only so many.
@cache
def _mesh(device_type: str, g_data: int, g_inter: int) -> DeviceMesh:
    return init_device_mesh(device_type, (g_data, g_inter), mesh_dim_names=("data", "inter"))


def _groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's row and column of a mesh."""
    return (
        mesh.get_group("inter") if mesh.size(1) > 1 else None,
        mesh.get_group("data") if mesh.size(0) > 1 else None,
    )


@cache
def _logged(feeds: int, ranks: int) -> dist.ProcessGroup | None:
    if feeds == 1:
        return None
    places = [[place + feed * ranks for feed in range(feeds)] for place in range(ranks)]
    groups: list[dist.ProcessGroup] = [
        dist.new_group(place, group_desc="logged values") for place in places
    ]
    return groups[dist.get_rank() % ranks]


@cache
def _meeting() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(group_desc="the ends of loops")
    return group


@cache
def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks))
    return group


def _broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    values = [value]
    dist.broadcast_object_list(values, src=source, group=group)
    return values[0]
