"""Chooses the number of stages for a module, by the number of ranks and the free memory."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule

from lightning_axosparse.distributed.mpi.environment import from_first_rank
from lightning_axosparse.pipeline.shard.partition import partition_layers
from lightning_axosparse.pipeline.shard.profile import profile_example
from lightning_axosparse.planning.cost import DENSE, default_cluster, layer_costs
from lightning_axosparse.planning.search import GridComparison, Workload, compare_grids
from lightning_axosparse.strategy.config import Config
from lightning_axosparse.strategy.mpi_strategy import MPIStrategy
from lightning_axosparse.support.memory import free_bytes


def choose_grid(config: Config, ranks: MPIStrategy, module: LightningModule) -> GridComparison:
    """Choose the grid before ranks start; where they run already, the first rank chooses for all.

    Args:
        config: the strategy's arguments.
        ranks: the strategy, with its devices and number of nodes.
        module: the user's module, whole and on CPU.

    Raises:
        MisconfigurationException: if there is no container, or no grid that fits.
    """

    def decide() -> GridComparison:
        partition = partition_layers(module, config.pipeline, None, stages=1)
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
        recompute = config.recompute is not None
        balance: Literal["time", "parameters"] = (
            "time" if config.balance == "time" else "parameters"
        )
        workload = Workload(
            costs,
            cluster,
            0,
            DENSE,
            recompute=recompute,
            balance=balance,
            shard_optimizer=config.shard_optimizer,
        )
        return compare_grids(workload, config.microbatches, config.in_flight)

    return from_first_rank(decide)
