"""Regrid: going on with shorter pipelines and more replicas, once pruning has made room for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_axosparse.deployment import Deal, Deployment
from lightning_axosparse.grid import Grid
from lightning_axosparse.planning.search import divisors
from lightning_axosparse.sparse.accounting import state_bytes


def refuse_arguments(
    regrid: int | str | None, transport: str, in_flight: int | None, schedule: str
) -> None:
    """Refuse what a run cannot move with.

    Raises:
        MisconfigurationException: naming the argument that does not go with ``regrid``.
    """
    if regrid is not None and transport == "loopback":
        raise MisconfigurationException(
            f"regrid={regrid!r} moves layers between ranks, but transport='loopback' runs all "
            "stages in one process. Leave regrid out."
        )
    if regrid == "auto" and (in_flight is not None or schedule != "message-driven"):
        raise MisconfigurationException(
            "regrid='auto' needs the bytes of a micro-batch, which are measured for "
            "schedule='message-driven' with in_flight=None alone. Leave these two as they are by "
            "default, or give regrid a number of stages."
        )


def refuse_length(regrid: int | str | None, g_inter: int) -> None:
    """Refuse a number of stages that a pipeline of ``g_inter`` cannot be shortened to.

    Raises:
        MisconfigurationException: naming the numbers that are possible.
    """
    shorter = divisors(g_inter)[:-1]
    if isinstance(regrid, int) and regrid not in shorter:
        choice = f"Choose from {shorter}, or 'auto'" if shorter else "Leave regrid out"
        raise MisconfigurationException(
            f"regrid={regrid} is no proper divisor of g_inter={g_inter}, so the ranks of a "
            f"pipeline cannot form pipelines of so many stages. {choice}."
        )
    if isinstance(regrid, str) and regrid != "auto":
        raise MisconfigurationException(
            f"regrid={regrid!r} is not known. Give a number of stages, or 'auto'."
        )


def refuse_module(module: nn.Module) -> None:
    """Refuse what would not stay the same when several replicas share a batch.

    Raises:
        MisconfigurationException: naming the layer or the metric.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            raise MisconfigurationException(
                f"{name!r} ({type(part).__name__}) keeps running statistics of the micro-batches "
                "that it sees. After a regrid replicas share each batch, so they would differ "
                "between them. Use a norm without, such as nn.GroupNorm or nn.LayerNorm, or leave "
                "regrid out, and resume the checkpoint with another g_inter."
            )
        if isinstance(part, Metric) and part.dist_sync_on_step:
            raise MisconfigurationException(
                f"The metric {name!r} ({type(part).__name__}) synchronises in every micro-batch "
                "(dist_sync_on_step=True), of which replicas that share a batch after a regrid may "
                "have different numbers. Leave dist_sync_on_step out, or regrid."
            )


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
    """Weights, indices, optimizer state, and gradients even where there are none just now."""
    stored = state_bytes(module)
    moments = (
        leaf.nbytes
        for optimizer in optimizers
        for parameter in module.parameters()
        for leaf in tree_leaves(optimizer.state.get(parameter, {}))
        if isinstance(leaf, Tensor)
    )
    return 2 * stored.weights + stored.indices + sum(moments)


def bubble(stages: int, microbatches: float) -> float:
    """Share of a step that equal stages wait while the pipeline fills and drains.

    Args:
        stages: number of stages.
        microbatches: micro-batches that go through them in a step.
    """
    return (stages - 1) / (microbatches + stages - 1)


@dataclass(frozen=True)
class Regridded:
    """A move from one grid to another.

    Attributes:
        old: the grid as it was.
        new: the grid as it is.
        epoch: the first epoch on the new grid, counted from 0.
        seconds: how long the move took.
        microbatches: micro-batches that a batch is cut into, for all replicas that share it.
    """

    old: Grid
    new: Grid
    epoch: int
    seconds: float
    microbatches: int

    @property
    def bubbles(self) -> tuple[float, float]:
        """The :func:`bubble` before and after."""
        return (
            bubble(self.old.g_inter, self.microbatches / self.old.sharing),
            bubble(self.new.g_inter, self.microbatches / self.new.sharing),
        )

    def __str__(self) -> str:
        """Tell both grids, their bubbles, and the time."""
        before, after = self.bubbles
        return (
            f"Epoch {self.epoch} begins on {self.new.g_inter} stages x {self.new.g_data} replicas "
            f"instead of {self.old.g_inter} x {self.old.g_data}, {self.new.sharing} to a batch: a "
            f"bubble of {after:.1%} instead of {before:.1%}. The move took {self.seconds:.2f} s."
        )
