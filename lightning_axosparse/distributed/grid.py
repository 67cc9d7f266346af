"""The grid of ranks: the stage and the replica of each rank, and the batches that it receives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from math import isqrt

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.support.troubleshooting import see


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True)
class Grid:
    """The ranks of a job as ``g_data`` replicas of ``g_tensor`` pipelines of ``g_inter`` ranks.

    The layout is AxoNN's (Singh & Bhatele, IPDPS 2022): a pipeline consists of consecutive ranks,
    so that the most frequent messages stay inside a node. Its first rank runs the last stage, so
    that losses, outputs, metrics and loggers are on rank 0. Each pipeline of a replica has a part
    of every tensor-parallel weight; the ranks of a replica with the same stage are a tensor group.

    With 8 ranks, ``g_inter=2`` and ``g_tensor=2``, ranks 0 to 3 are replica 0: ranks 1 and 3 have
    stage 0, ranks 0 and 2 have stage 1, and these two pairs are tensor groups.

    Args:
        world_size: number of ranks in the job.
        g_inter: stages per replica; ``g_inter * g_tensor`` must divide ``world_size``.
        rank: this process's rank.
        replicas_per_batch: number of consecutive replicas that load the same batches, and train on
            a part of each. It is above 1 after a regrid to shorter pipelines.
        g_tensor: number of ranks that share the layers of a stage.
        g_expert: number of consecutive replicas over which the experts of a stage are spread.

    Raises:
        MisconfigurationException: if ``g_inter * g_tensor * g_expert`` is no positive divisor of
            ``world_size``.
    """

    world_size: int
    g_inter: int
    rank: int = 0
    replicas_per_batch: int = 1
    g_tensor: int = 1
    g_expert: int = 1

    def __post_init__(self) -> None:
        if self.g_inter < 1 or self.world_size % self.g_inter:
            raise MisconfigurationException(
                f"g_inter={self.g_inter} stages per replica do not divide the world of "
                f"{self.world_size} rank(s). Choose g_inter from {divisors(self.world_size)}, or "
                f"pass Trainer(devices={max(self.g_inter, 1)}) or a multiple of it." + see("grid")
            )
        if self.g_tensor < 1 or self.world_size % self._ranks_per_replica:
            raise MisconfigurationException(
                f"tensor_parallel={self.g_tensor} ranks for each of g_inter={self.g_inter} stages "
                f"do not divide the world of {self.world_size} rank(s). Choose tensor_parallel "
                f"from {divisors(self.world_size // self.g_inter)}, or change `devices`."
                + see("grid")
            )
        if self.g_expert < 1 or self.g_data % self.g_expert:
            raise MisconfigurationException(
                f"expert_parallel={self.g_expert} ranks, over which the experts of a stage are "
                f"spread, do not divide the {self.g_data} replicas. Choose expert_parallel from "
                f"{divisors(self.g_data)}, or change `devices`." + see("grid")
            )

    @property
    def g_data(self) -> int:
        """Number of replicas."""
        return self.world_size // self._ranks_per_replica

    @property
    def stage(self) -> int:
        """The index of this rank's stage, counted from the input."""
        return self.g_inter - 1 - self.rank % self.g_inter

    @property
    def replica(self) -> int:
        """The index of this rank's replica."""
        return self.rank // self._ranks_per_replica

    @property
    def pipeline_index(self) -> int:
        """The index of this rank's pipeline in the job; the first pipeline writes checkpoints."""
        return self.rank // self.g_inter

    @property
    def tensor_rank(self) -> int:
        """The index of this rank's part of tensor-parallel weights."""
        return self.pipeline_index % self.g_tensor

    @property
    def expert_rank(self) -> int:
        """The index of this rank's part of the experts of its stage."""
        return self.replica % self.g_expert

    @property
    def copy_index(self) -> int:
        """Which copy of the whole model this rank has a part of."""
        return self.replica // self.g_expert

    @property
    def data_size(self) -> int:
        """Number of different batches in a step."""
        return self.g_data // self.replicas_per_batch

    @property
    def data_rank(self) -> int:
        """The index of this rank's batch among these."""
        return self.replica // self.replicas_per_batch

    @property
    def evaluation_group(self) -> int:
        """A number that ranks share if they must evaluate equally many batches.

        These have the same batches, or compute tokens for each other.
        """
        return self.data_rank // self.g_expert

    @property
    def part_of_batch(self) -> int:
        """The index of the part of a batch on which this rank's replica trains."""
        return self.replica % self.replicas_per_batch

    @property
    def pipeline(self) -> list[int]:
        """The ranks of this rank's pipeline, first stage first."""
        last_stage = self.pipeline_index * self.g_inter
        return list(reversed(range(last_stage, last_stage + self.g_inter)))

    def first_rank(self, stage: int) -> int:
        """Return the first rank of this replica with a stage."""
        return self.replica * self._ranks_per_replica + self.g_inter - 1 - stage

    @property
    def same_batch_ranks(self) -> list[int]:
        """The ranks whose loaders return the same batches as this rank's."""
        number = self._ranks_per_replica * self.replicas_per_batch
        return list(range(self.data_rank * number, (self.data_rank + 1) * number))

    def ranks_by(
        self, key: Callable[[Grid], Hashable], stages: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return the ranks of the job in groups with the same key.

        Args:
            key: returns the key of a rank, such as the index of its pipeline, from its grid.
            stages: the stages whose ranks are in the groups; None for all.
        """
        groups: dict[Hashable, list[int]] = {}
        for rank in range(self.world_size):
            grid = replace(self, rank=rank)
            if stages is None or grid.stage in stages:
                groups.setdefault(key(grid), []).append(rank)
        return list(groups.values())

    @property
    def _ranks_per_replica(self) -> int:
        return self.g_inter * self.g_tensor

    def shortened(self, g_inter: int) -> Grid:
        """Return a grid with pipelines of ``g_inter`` stages, in which every rank keeps its loader.

        A pipeline of 4 stages becomes two replicas of 2 stages, each of which trains on half of
        every batch.
        """
        replicas_per_batch = self.replicas_per_batch * self.g_inter // g_inter
        return Grid(self.world_size, g_inter, self.rank, replicas_per_batch)
