"""Autogrid: the number of stages that suits a module on the ranks and the memory at hand."""

from __future__ import annotations

from typing import Literal

from lightning.pytorch import LightningModule

from lightning_axosparse.dealing import deal, profile_example
from lightning_axosparse.memory import free_bytes
from lightning_axosparse.mpi.environment import from_first_rank
from lightning_axosparse.planning.automatic import Decision, choose, layer_costs, machine, timeless
from lightning_axosparse.planning.memory import DENSE
from lightning_axosparse.planning.search import Job
from lightning_axosparse.ranks import GridStrategy


def suitable_grid(
    ranks: GridStrategy,
    module: LightningModule,
    container: str | None,
    microbatches: int | None,
    in_flight: int | None,
    recompute: bool,
    balance: Literal["time", "parameters"],
) -> Decision:
    """Choose the grid before ranks start; where they run already the first one's choice counts.

    Args:
        ranks: the strategy, which knows how many ranks there will be, and on what.
        module: the user's module, whole and on CPU.
        container: attribute path of the pipelined container; None for the only candidate.
        microbatches: of a replica's batch; None for the default.
        in_flight: the in-flight limit; None for what memory allows.
        recompute: whether layers are recomputed in the backward pass.
        balance: what the stages are given evenly.

    Raises:
        MisconfigurationException: if there is no container, or no grid that fits.
    """

    def decide() -> Decision:
        dealt = deal(module, container, None, stages=1)
        devices = len(ranks.parallel_devices or ())
        device = ranks.root_device
        free = free_bytes(device, ranks.ranks_on_device)
        cluster = machine(device.type, devices * ranks.num_nodes, devices, free)
        profiles = None
        if module.example_input_array is None:
            cluster = timeless(cluster)
        else:
            profiles = profile_example(module, dealt, ranks.precision_plugin, device)
        costs = layer_costs(module, dealt.layers, profiles)
        job = Job(costs, cluster, 0, DENSE, recompute=recompute, balance=balance)
        return choose(job, microbatches, in_flight)

    return from_first_rank(decide)
