"""Shortest: the fewest stages whose layers and micro-batches fit into every rank's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_axosparse.dealing import Deal
from lightning_axosparse.deployment import Deployment
from lightning_axosparse.grid import divisors
from lightning_axosparse.sparse.accounting import state_bytes


@dataclass(frozen=True)
class Memory:
    """What one rank holds and may hold, in bytes.

    Attributes:
        layers: model state of each layer on this rank, by the layer's index.
        outside: model state outside the layers, which every stage has.
        kept: what a micro-batch leaves behind in these layers between forward and backward.
        free: what the rank may take besides.
    """

    layers: Mapping[int, int]
    outside: int
    kept: int
    free: int

    @property
    def room(self) -> int:
        """All that there is for model state and micro-batches."""
        return self.free + self.outside + sum(self.layers.values())


def measure(
    deployment: Deployment, optimizers: Sequence[Optimizer], kept: int, free: int
) -> Memory:
    """Count what this rank's layers take.

    Args:
        deployment: the part of the module on this rank.
        optimizers: its optimizers, which have stepped, and so have their state.
        kept: bytes that a micro-batch leaves behind on this rank.
        free: bytes that this rank may still take.
    """
    layers, parts = deployment.layers.layers, deployment.layers.parts
    own = [index for stage in deployment.stages for index in parts[stage]]
    inside = {parameter for index in own for parameter in layers[index].parameters()}
    everything = deployment.split.held().values()
    outside = nn.ParameterList([p for p in everything if p not in inside])
    return Memory(
        layers={index: _state_bytes(layers[index], optimizers) for index in own},
        outside=_state_bytes(outside, optimizers),
        kept=kept,
        free=free,
    )


def shortest(dealt: Deal, memories: Sequence[Memory]) -> int | None:
    """Find the fewest stages whose layers and micro-batches fit into every rank's memory.

    Every stage of so many holds as many micro-batches as there are stages, which is what 1F1B
    takes; by AxoNN's analysis the shortest pipeline that fits is the fastest.

    Args:
        dealt: the layers as they are dealt now.
        memories: what each rank holds and may hold.

    Returns:
        A divisor of the present number of stages, perhaps that number itself; None as long as no
        micro-batch has been measured.
    """
    if not any(memory.kept for memory in memories):
        return None
    now = len(dealt.parts)
    state = [0.0] * len(dealt.layers)
    kept = [0.0] * len(dealt.layers)
    for memory in memories:
        for index, held in memory.layers.items():
            state[index] = max(state[index], held)
            kept[index] = max(kept[index], memory.kept / len(memory.layers))
    room = min(memory.room for memory in memories)
    outside = max(memory.outside for memory in memories)
    for stages in divisors(now):
        parts = dealt.among(stages).parts
        need = outside + max(sum(state[i] + stages * kept[i] for i in part) for part in parts)
        if need <= room or stages == now:
            break
    rank_zero_info(
        f"regrid='auto' takes {stages} of {now} stages: a rank needs {need / 1e6:,.1f} MB of the "
        f"{room / 1e6:,.1f} MB there are."
    )
    return stages


def _state_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """Weights, indices, resident copies, gradients even if there are none now, optimizer state.

    Not the state that is offloaded: it takes none of the device's memory.
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
