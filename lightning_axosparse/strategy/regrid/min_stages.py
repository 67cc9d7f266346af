"""Finds the fewest stages whose layers and micro-batches fit into every rank's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.pipeline.shard.partition import Partition
from lightning_axosparse.sparse.module.state_size import state_bytes
from lightning_axosparse.strategy.stage_module import StageModule
from lightning_axosparse.support.torch_internals import tree_leaves


@dataclass(frozen=True)
class RankMemory:
    """What one rank holds and may hold, in bytes.

    Attributes:
        layers: model state of each layer on this rank, by the layer's index.
        outside: model state outside the layers, which every stage has.
        activations: what a micro-batch keeps in these layers between forward and backward.
        free: what the rank may still allocate.
    """

    layers: Mapping[int, int]
    outside: int
    activations: int
    free: int

    @property
    def total(self) -> int:
        """What model state and micro-batches may take together."""
        return self.free + self.outside + sum(self.layers.values())


def measure_memory(
    stage_module: StageModule, optimizers: Sequence[Optimizer], activations: int, free: int
) -> RankMemory:
    """Count the bytes of this rank's layers.

    Args:
        stage_module: the part of the module on this rank.
        optimizers: its optimizers, which have stepped, and so have their state.
        activations: bytes that a micro-batch keeps on this rank.
        free: bytes that this rank may still allocate.
    """
    layers, parts = stage_module.layers.layers, stage_module.layers.parts
    own = [index for stage in stage_module.stages for index in parts[stage]]
    inside = {parameter for index in own for parameter in layers[index].parameters()}
    held = stage_module.sharding.held().values()
    outside = nn.ParameterList([p for p in held if p not in inside])
    return RankMemory(
        layers={index: model_state_bytes(layers[index], optimizers) for index in own},
        outside=model_state_bytes(outside, optimizers),
        activations=activations,
        free=free,
    )


def fewest_stages(partition: Partition, memories: Sequence[RankMemory]) -> int | None:
    """Find the fewest stages whose layers and micro-batches fit into every rank's memory.

    Each of n stages is counted with n micro-batches in flight, as in 1F1B. By AxoNN's analysis
    (Singh & Bhatele, IPDPS 2022) the shortest pipeline that fits is the fastest.

    Args:
        partition: the layers of the present stages.
        memories: what each rank holds and may hold.

    Returns:
        A divisor of the present number of stages, perhaps that number itself; None as long as no
        micro-batch has been measured.
    """
    if not any(memory.activations for memory in memories):
        return None
    now = len(partition.parts)
    state = [0.0] * len(partition.layers)
    activations = [0.0] * len(partition.layers)
    for memory in memories:
        for index, held in memory.layers.items():
            state[index] = max(state[index], held)
            activations[index] = max(activations[index], memory.activations / len(memory.layers))
    available = min(memory.total for memory in memories)
    outside = max(memory.outside for memory in memories)
    for stages in divisors(now):
        parts = partition.with_stages(stages).parts
        need = outside + max(
            sum(state[i] + stages * activations[i] for i in part) for part in parts
        )
        if need <= available or stages == now:
            break
    rank_zero_info(
        f"regrid='auto' takes {stages} of {now} stages: a rank needs {need / 1e6:,.1f} MB of the "
        f"{available / 1e6:,.1f} MB there are."
    )
    return stages


def model_state_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Count the bytes of weights, indices, resident copies, gradients and optimizer state.

    Gradients are counted even where there are none now. Offloaded optimizer state is not counted:
    it takes none of the device's memory.
    """
    stored = state_bytes(module)
    moments = (
        leaf.nbytes
        for optimizer in optimizers
        for parameter in module.parameters()
        for leaf in tree_leaves(optimizer.state.get(parameter, {}))
        if isinstance(leaf, Tensor) and leaf.device == parameter.device
    )
    return 2 * stored.weights + stored.resident + stored.indices + sum(moments)
