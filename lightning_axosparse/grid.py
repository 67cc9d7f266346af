"""Grid: which rank is which stage of which replica."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from lightning.fabric.utilities.exceptions import MisconfigurationException


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


@dataclass(frozen=True)
class Grid:
    """The ranks of a job as ``g_data`` pipelines (replicas) of ``g_inter`` consecutive ranks.

    The layout is AxoNN's (Singh & Bhatele, IPDPS 2022): a pipeline is a run of consecutive ranks,
    so that the most frequent messages stay inside a node.

    Args:
        world_size: number of ranks in the job.
        g_inter: stages per replica; must divide ``world_size``.
        rank: this process's rank.
        sharing: number of neighbouring replicas that share each batch, as the short pipelines do
            that came out of a long one. They make up a feed: ranks that are given the same samples.

    Raises:
        MisconfigurationException: if ``g_inter`` is not a positive divisor of ``world_size``.
    """

    world_size: int
    g_inter: int
    rank: int = 0
    sharing: int = 1

    def __post_init__(self) -> None:
        if self.g_inter < 1 or self.world_size % self.g_inter:
            raise MisconfigurationException(
                f"g_inter={self.g_inter} stages per replica do not divide the world of "
                f"{self.world_size} rank(s). Choose g_inter from {divisors(self.world_size)}, or "
                "change `devices`."
            )

    @property
    def g_data(self) -> int:
        """Number of replicas."""
        return self.world_size // self.g_inter

    @property
    def stage(self) -> int:
        """This rank's place in its pipeline, counted from the input."""
        return self.rank % self.g_inter

    @property
    def replica(self) -> int:
        """Which pipeline this rank belongs to."""
        return self.rank // self.g_inter

    @property
    def feeds(self) -> int:
        """Number of different batches that the job trains on at a time."""
        return self.g_data // self.sharing

    @property
    def feed(self) -> int:
        """Which of these batches this rank is given."""
        return self.replica // self.sharing

    @property
    def fed_alike(self) -> range:
        """The ranks of this rank's feed."""
        width = self.g_inter * self.sharing
        return range(self.feed * width, (self.feed + 1) * width)

    @property
    def share(self) -> int:
        """Which share of its feed's batch this rank's replica computes."""
        return self.replica % self.sharing

    def ranks_holding(self, stages: frozenset[int]) -> list[int]:
        """The ranks, over all replicas, of the given stages, in ascending order."""
        return [rank for rank in range(self.world_size) if rank % self.g_inter in stages]

    def pipeline(self, replica: int) -> list[int]:
        """The ranks of one replica, first stage first."""
        return list(range(replica * self.g_inter, (replica + 1) * self.g_inter))

    def sharers(self, stage: int) -> list[int]:
        """The ranks of a stage in the replicas that share this rank's batches, in their order."""
        return [rank for rank in self.fed_alike if rank % self.g_inter == stage]

    def shortened(self, g_inter: int) -> Grid:
        """The grid whose pipelines have ``g_inter`` stages and whose feeds are the same ranks.

        Args:
            g_inter: stages of the shorter pipelines; must divide this grid's.
        """
        sharing = self.sharing * self.g_inter // g_inter
        return Grid(self.world_size, g_inter, self.rank, sharing)
