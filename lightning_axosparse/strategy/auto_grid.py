"""Chooses the number of stages for a module, by the number of ranks and the free memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning.pytorch import LightningModule

from lightning_axosparse.distributed.mpi.environment import from_first_rank
from lightning_axosparse.pipeline.partition import partition_layers
from lightning_axosparse.pipeline.profile import profile_example
from lightning_axosparse.planning.cost import default_cluster, layer_costs
from lightning_axosparse.planning.grid_comparison import GridComparison, compare_grids
from lightning_axosparse.planning.memory_model import DENSE
from lightning_axosparse.planning.search import Workload
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.support.available_memory import free_bytes


def choose_grid(
    ranks: MPIStrategy,
    module: LightningModule,
    pipeline: str | Sequence[str] | None,
    microbatches: int | None,
    in_flight: int | None,
    recompute: bool,
    balance: Literal["time", "parameters"],
) -> GridComparison:
    """Choose the grid before ranks start; where they run already, the first rank chooses for all.

    Args:
        ranks: the strategy, with its devices and number of nodes.
        module: the user's module, whole and on CPU.
        pipeline: where the layers are, as for ``find_layers``.
        microbatches: of a replica's batch; None for the default.
        in_flight: the in-flight limit; None for what memory allows.
        recompute: whether layers are recomputed in the backward pass.
        balance: what stages have the same amount of.

    Raises:
        MisconfigurationException: if there is no container, or no grid that fits.
    """

    def decide() -> GridComparison:
        partition = partition_layers(module, pipeline, None, stages=1)
        devices = len(ranks.parallel_devices or ())
        device = ranks.root_device
        free = free_bytes(device, ranks.ranks_on_device)
        cluster = default_cluster(device.type, devices * ranks.num_nodes, devices, free)
        profiles = None
        if module.example_input_array is None:
            cluster = cluster.with_free_transfers()
        else:
            profiles = profile_example(module, partition, ranks.precision_plugin, device)
        costs = layer_costs(module, partition.layers, profiles)
        workload = Workload(costs, cluster, 0, DENSE, recompute=recompute, balance=balance)
        return compare_grids(workload, microbatches, in_flight)

    return from_first_rank(decide)
