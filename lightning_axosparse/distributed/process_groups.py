"""Creates the process groups of a grid, and passes picklable objects over process groups."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_axosparse.distributed.grid import Grid

T = TypeVar("T")


class ProcessGroups:
    """The process groups of this rank; a group of one rank is None.

    Creating it is collective over the job. ``torch.distributed`` must be initialized if the grid
    has more than one rank.

    Args:
        grid: the grid of ranks, with this rank.

    Attributes:
        world: all ranks.
        inter: the stages of this pipeline.
        tensor: the ranks that share this stage's layers.
        replica: all ranks of this replica; ``inter`` if ranks do not share layers.
        data: this stage in all replicas, with the same part of tensor-parallel weights.
        experts: the ranks over which this stage's experts are spread.
        same_experts: the ranks with the same experts, which may be this rank alone; None if experts
            are not spread.
        whole: the ranks that have the full model together; ``replica`` if experts are not spread.
        ordered: the ranks of this stage whose layers exchange values, so that they run the same
            passes in the same order; ``tensor`` if experts are not spread.
        same_loader: the ranks whose loaders return the same batches; ``replica`` except after a
            regrid.
        logged: the ranks of ``data``, in a separate group for logged values: if only some ranks log
            a value, it is not taken for another collective.
        loop_ends: all ranks, in a separate group for the comparison at both ends of a loop, which a
            rank at another point of the loop must not take for another collective.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.world = dist.group.WORLD if grid.world_size > 1 else None
        self.inter = self._group("stages of a pipeline", lambda rank: rank.pipeline_index)
        self.tensor = self._group(
            "ranks that share layers", lambda rank: (rank.replica, rank.stage)
        )
        self.replica = self.inter
        if self.tensor is not None:
            self.replica = self._group("ranks of a replica", lambda rank: rank.replica)
        self.data = self._group("replicas of a stage", _shard)
        self.experts = self.same_experts = None
        self.whole, self.ordered = self.replica, self.tensor
        if grid.g_expert > 1:
            self.experts = self._group(
                "ranks with experts of a stage", lambda rank: (rank.copy_index, _shard(rank))
            )
            self.same_experts = self._group(
                "the same experts", lambda rank: (rank.expert_rank, rank.stage), smallest=1
            )
            self.whole = self._group("ranks of a whole model", lambda rank: rank.copy_index)
            self.ordered = self._group(
                "ranks that run the same passes", lambda rank: (rank.copy_index, rank.stage)
            )
        self.same_loader = self.replica
        if grid.replicas_per_batch > 1:
            self.same_loader = self._group("ranks of a loader", lambda rank: rank.data_rank)
        self.logged = self._group("logged values", _shard)
        self.loop_ends = self._group("the ends of loops", lambda rank: 0)

    def device_mesh(self, device: torch.device) -> DeviceMesh:
        """Create Lightning's mesh of this stage's ranks: ``data_parallel`` x ``tensor_parallel``.

        There must be a tensor group. Collective over the job.
        """
        grid, data = self.grid, self.data
        if data is None:
            data = self._group("a replica alone", _shard, smallest=1)
        mesh = grid.ranks_by(lambda rank: rank.replica, {grid.stage})
        assert data is not None
        assert self.tensor is not None
        return DeviceMesh.from_group(
            [data, self.tensor],
            device.type,
            mesh,
            mesh_dim_names=("data_parallel", "tensor_parallel"),
        )

    def create_shared(self, sets: Iterable[frozenset[int]]) -> None:
        """Create the groups for sets of stages that share parameters; collective."""
        for stages in sorted(set(sets), key=sorted):
            if len(stages) > 1:
                self._of_stages(stages)
                self.shared_in_pipeline(stages)

    def shared_by_stages(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        """Return the group of these stages in all replicas; this rank's stage is one of them."""
        return self.data if len(stages) == 1 else self._of_stages(stages)

    def shared_in_pipeline(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        """Return the group of these stages in this pipeline; this rank's stage is one of them."""
        if len(stages) == 1:
            return None
        if len(stages) == self.grid.g_inter:
            return self.inter
        return self._group("shared parameters in a batch", lambda rank: rank.pipeline_index, stages)

    def _of_stages(self, stages: frozenset[int]) -> dist.ProcessGroup | None:
        return self._group("shared parameters", lambda rank: rank.tensor_rank, stages)

    def _group(
        self,
        description: str,
        key: Callable[[Grid], Hashable],
        stages: Collection[int] | None = None,
        smallest: int = 2,
    ) -> dist.ProcessGroup | None:
        """Create a group of ranks for each value of ``key``, and return the one with this rank."""
        own = None
        for ranks in self.grid.ranks_by(key, stages):
            if len(ranks) >= smallest:
                created = _created.setdefault(dist.group.WORLD, {})
                name = description, tuple(ranks)
                if name not in created:
                    created[name] = dist.new_group(ranks, group_desc=description)
                own = created[name] if self.grid.rank in ranks else own
        return own

    # With the loopback transport one rank runs all stages. Its groups are None then, and every
    # stage has the rank's value.

    def broadcast_along_pipeline(self, value: T, stage: int) -> T:
        """Return the ``value`` of ``stage`` on every stage of this pipeline."""
        if self.inter is None:
            return value
        return broadcast(value, self.grid.pipeline[stage], self.inter)

    def broadcast_in_replica(self, value: T, stage: int) -> T:
        """Return the ``value`` of ``stage`` on all ranks of this replica."""
        if self.replica is None:
            return value
        return broadcast(value, self.grid.first_rank(stage), self.replica)


_created: WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()
"""World group of a job -> the groups that were created in it.

The next run with the same grid in this process uses them again: torch.distributed frees no group
before the world group, each group has its own communicator, and MPI has a limited number of these.
"""


def _shard(rank: Grid) -> tuple[int, int]:
    """Return a key for the part of a replica that a rank has."""
    return rank.tensor_rank, rank.stage


def all_sum(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a CPU tensor over the ranks of ``group``, in place; None is this rank alone."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


def all_gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the picklable ``value`` of every rank of ``group``, in rank order, on every rank."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, _pickled(value), group=group)
    return list(map(pickle.loads, gathered))


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Do the same as :func:`all_gather` on the first rank; return an empty list on the others."""
    if group is None:
        return [value]
    first = dist.get_rank(group) == 0
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    first_rank = dist.get_global_rank(group, 0)
    dist.gather_object(_pickled(value), gathered, dst=first_rank, group=group)
    return list(map(pickle.loads, gathered or ()))


def broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """Return the picklable ``value`` of rank ``source`` of the job on every rank of ``group``."""
    is_source = dist.get_rank() == source
    pickled = [_pickled(value) if is_source else b""]
    dist.broadcast_object_list(pickled, src=source, group=group)
    return value if is_source else pickle.loads(pickled[0])


def broadcast_from_first(value: T, group: dist.ProcessGroup | None) -> T:
    """Return the picklable ``value`` of the first rank of ``group`` on all its ranks."""
    return value if group is None else broadcast(value, dist.get_global_rank(group, 0), group)


class _Pickler(pickle.Pickler):
    """Pickles CPU tensors as their bytes; torch writes each as a file, by classes made for it."""

    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.is_cpu
        if not is_plain or value.requires_grad or value.is_quantized or value.is_nested:
            return NotImplemented
        if vars(value):  # attributes of the user
            return NotImplemented
        entries = value.resolve_conj().resolve_neg().contiguous().flatten()
        return _tensor, (entries.view(torch.uint8).numpy().tobytes(), value.dtype, value.shape)


def _tensor(entries: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    data = torch.frombuffer(bytearray(entries), dtype=dtype) if entries else torch.empty(0)
    return data.to(dtype).view(shape)


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()
