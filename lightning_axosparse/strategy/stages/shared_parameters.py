"""Groups this rank's parameters by the ranks that share them, and sums gradients over these."""

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
    """This rank's parameters, by the ranks that store the same ones.

    Creating it is collective over all ranks.

    Args:
        sharding: the stages that store each tensor.
        parts: the parameters of which this rank has a part.
        groups: the process groups of the grid.

    Attributes:
        reducer: sums the gradients between :meth:`attach` and :meth:`detach`; None on one rank.
    """

    def __init__(self, sharding: Sharding, parts: WeightParts, groups: ProcessGroups) -> None:
        self._sharding, self._parts = sharding, parts
        self.reducer: GradientReducer | None = None
        self._reduces = True
        self._accumulated: set[nn.Parameter] = set()
        self._part: Part | None = None
        self.set_groups(groups)

    def set_groups(self, groups: ProcessGroups) -> None:
        """Set the process groups of a grid; collective over all ranks."""
        self._groups, self._grid = groups, groups.grid
        if self._grid.g_inter > 1:
            groups.create_shared(self._sharding.holders.values())

    def attach(self) -> None:
        """Sum gradients from now on."""
        if self._grid.world_size > 1:
            reduced = self._reduction_groups()
            self.reducer = GradientReducer(reduced, self._grid.g_data, self._part)
            self.reducer.accumulated = self._accumulated

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        if self.reducer is not None:
            self.reducer.remove()
            self.reducer = None

    @property
    def step_reducer(self) -> GradientReducer | None:
        """The reducer of the running step; None if its gradients are not reduced."""
        return self.reducer if self._reduces else None

    def without_reduction(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced."""
        if self.reducer is not None:
            self._accumulated.update(p for p in self.reducer.parameters if p.requires_grad)
        return patched(self, "_reduces", False)

    def divide(self, part: Part) -> None:
        """Let each gradient, once it is reduced, have only this replica's part."""
        self._part = part
        if self.reducer is not None:
            self.reducer.part = part

    def wait_for(self, parameters: Iterable[nn.Parameter]) -> None:
        """Wait until the gradients of these parameters are reduced."""
        if self.reducer is not None:
            self.reducer.wait_for(parameters)

    def replicas_of(self, parameter: Tensor) -> dist.ProcessGroup | None:
        """Return the ranks that store the same values of a parameter; None for this rank alone."""
        groups = self._groups
        group = groups.same_experts if parameter in self._spread_experts() else groups.data
        return None if group is None or group.size() == 1 else group

    def sharing_batch(self, parameters: Collection[nn.Parameter]) -> dict[nn.Parameter, Any]:
        """Return the ranks whose gradients of some parameters add up to those of a batch.

        Returns:
            The process group of each parameter, in the same order on all ranks; None for this rank.
        """
        local = self._sharding.local_parameters() if parameters else {}
        return {
            parameter: self._groups.shared_in_pipeline(self._holders(name))
            for name, parameter in local.items()
            if parameter in parameters
        }

    def broadcast_weights(self) -> None:
        """Broadcast the first replica's parameters to all replicas."""
        for name, parameter in self._sharding.local_parameters().items():
            broadcast_first(parameter.data, self._groups.shared_by_stages(self._holders(name)))
            broadcast_first(parameter.data, self._groups.tensor)

    def _reduction_groups(self) -> list[ReductionGroup]:
        """Group this rank's parameters by the ranks that store them, alike on all ranks."""
        by_stages: dict[frozenset[int], list[nn.Parameter]] = {}
        experts, spread = [], self._spread_experts()
        for name, parameter in self._sharding.local_parameters().items():
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

    def _spread_experts(self) -> set[Tensor]:
        """Return the parameters of experts that are spread over ranks."""
        parts, experts = self._parts.parameters.values(), self._groups.experts
        return {part.entry.parameter for part in parts if part.group is experts}

    def _holders(self, name: str) -> frozenset[int]:
        """Return the stages that store a parameter, by their numbers in the grid."""
        stages = self._sharding.holders_of(name)
        return stages if self._grid.g_inter > 1 else frozenset([0])


def broadcast_first(tensor: Tensor, group: dist.ProcessGroup | None) -> None:
    """Broadcast the tensor of a group's first rank; None is a group of this rank alone."""
    if group is not None:
        dist.broadcast(tensor, group_src=0, group=group)
