"""Knows which ranks keep the same parameters as this one, and sums their gradients over them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_axosparse.distributed.gradient_reducer import (
    GradientReducer,
    Part,
    ReductionGroup,
)
from lightning_axosparse.distributed.process_groups import ProcessGroups
from lightning_axosparse.pipeline.shard.sharding import Sharding
from lightning_axosparse.strategy.weight_parts import WeightParts
from lightning_axosparse.support.patched import patched


class SharedParameters:
    """The parameters that this rank keeps, by the ranks that keep the same ones.

    Creating it is collective over the job.

    Args:
        sharding: which tensors each stage keeps.
        parts: the parameters of which this rank has a part.
        groups: the process groups of the grid.

    Attributes:
        reducer: sums their gradients; None in a job of one rank, and where layers do not compute.
    """

    def __init__(self, sharding: Sharding, parts: WeightParts, groups: ProcessGroups) -> None:
        self._sharding, self._parts = sharding, parts
        self.reducer: GradientReducer | None = None
        self._reduces = True
        self._part: Part | None = None
        self.place_in(groups)

    def place_in(self, groups: ProcessGroups) -> None:
        """Take in the process groups of a grid; collective over the job."""
        self._groups, self._grid = groups, groups.grid
        if self._grid.g_inter > 1:
            groups.create_shared(self._sharding.holders.values())

    def attach(self) -> None:
        """Sum gradients from now on."""
        if self._grid.world_size > 1:
            reduced = self._reduction_groups()
            self.reducer = GradientReducer(reduced, self._grid.g_data, self._part)

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.reducer is not None:
            self.reducer.remove()
            self.reducer = None

    @property
    def step_reducer(self) -> GradientReducer | None:
        """The reducer of the running step; None where its gradients stay on this rank."""
        return self.reducer if self._reduces else None

    def kept_local(self) -> AbstractContextManager[None]:
        """Omit the all-reduce inside the context."""
        return patched(self, "_reduces", False)

    def divide(self, part: Part) -> None:
        """Keep only this replica's part of each gradient from the time that it is reduced."""
        self._part = part
        if self.reducer is not None:
            self.reducer.part = part

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until the gradients of these parameters are reduced."""
        if self.reducer is not None:
            self.reducer.wait_for(parameters)

    def replicas_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """The ranks that keep the same values of a parameter of this rank; None for it alone."""
        groups = self._groups
        group = groups.same_experts if parameter in self._spread() else groups.data
        return None if group is None or group.size() == 1 else group

    def sharing_batch(self, parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, Any]:
        """The ranks that have each a part of a batch's gradient of these parameters of this rank.

        Returns:
            By parameter, in the same order on all ranks, the process group; None for this rank.
        """
        held = self._sharding.held() if parameters else {}
        return {
            parameter: self._groups.shared_in_pipeline(self._holders(name))
            for name, parameter in held.items()
            if parameter in parameters
        }

    def broadcast_weights(self) -> None:
        """Give every replica the first one's parameters."""
        for name, parameter in self._sharding.held().items():
            broadcast_first(parameter.data, self._groups.shared_by_stages(self._holders(name)))
            broadcast_first(parameter.data, self._groups.tensor)

    def _reduction_groups(self) -> list[ReductionGroup]:
        """The kept parameters by the ranks that keep them, in the same order on all ranks."""
        by_stages: dict[frozenset[int], list[nn.Parameter]] = {}
        experts, spread = [], self._spread()
        for name, parameter in self._sharding.held().items():
            if parameter in spread:
                experts.append(parameter)
            else:
                by_stages.setdefault(self._holders(name), []).append(parameter)
        reduced = []
        for stages in sorted(by_stages, key=sorted):
            group = self._groups.shared_by_stages(stages)
            if group is not None:
                reduced.append(ReductionGroup(group, by_stages[stages]))
        if experts:
            assert self._groups.same_experts is not None
            reduced.append(ReductionGroup(self._groups.same_experts, experts))
        return reduced

    def _spread(self) -> set[Tensor]:
        """The parameters of experts of which this rank has some."""
        parts, experts = self._parts.parameters.values(), self._groups.experts
        return {part.entry.parameter for part in parts if part.group is experts}

    def _holders(self, name: str) -> frozenset[int]:
        """The stages that keep a parameter, counted as the grid counts them."""
        stages = self._sharding.holders_of(name)
        return stages if self._grid.g_inter > 1 else frozenset([0])


def broadcast_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Give all ranks of a group the tensor of the first one; None is a group of this rank."""
    if group is not None:
        dist.broadcast(tensor, group_src=0, group=group)
