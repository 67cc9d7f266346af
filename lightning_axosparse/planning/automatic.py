"""Automatic: how many stages suit a module on the machine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_axosparse.grid import divisors
from lightning_axosparse.pipeline.partition import count_parameters
from lightning_axosparse.pipeline.profile import LayerProfile
from lightning_axosparse.pipeline.simulate import Wire
from lightning_axosparse.planning.cost import Cluster, LayerCosts
from lightning_axosparse.planning.search import Choice, Job, Plan, evaluate

_FORWARD = 1 / 3
"""Share of the forward pass in the time of both: backward makes two gradients where it makes one
output."""

_SIMULATED = 64
"""Micro-batches a stage that are simulated at most: more change next to nothing but the time that
the simulation takes."""


def machine(kind: str, devices: int, devices_per_node: int, memory: float) -> Cluster:
    """A cluster of ordinary parts, whose work is counted in seconds.

    Args:
        kind: "cpu" or "cuda".
        devices: ranks.
        devices_per_node: ranks of a node.
        memory: bytes that a rank may take.
    """
    if kind == "cuda":
        memory_bandwidth, node, network = 1.5e12, Wire(1e-5, 2e11), Wire(1e-5, 2.5e10)
    else:
        memory_bandwidth, node, network = 5e9, Wire(2e-5, 5e9), Wire(5e-5, 2.5e9)
    return Cluster(devices, devices_per_node, memory, 1.0, memory_bandwidth, node, network)


def layer_costs(
    module: nn.Module, layers: Sequence[nn.Module], profiles: Sequence[LayerProfile] | None
) -> LayerCosts:
    """The costs of a module's layers; a sample is what they were profiled on.

    Args:
        module: the module round the layers.
        layers: the layers.
        profiles: what each layer takes; None where that is not known: then a layer's work is its
            parameters, and activations and messages are nothing.
    """
    weights = count_parameters(layers)
    if profiles is None:
        profiles = [
            LayerProfile(seconds=weight, kept_bytes=0, output_bytes=0) for weight in weights
        ]
    forward = tuple(_FORWARD * profile.seconds for profile in profiles)
    return LayerCosts(
        forward=forward,
        backward=tuple((1 - _FORWARD) * profile.seconds for profile in profiles),
        again=forward,
        weights=tuple(weights),
        kept_bytes=tuple(profile.kept_bytes for profile in profiles),
        output_bytes=tuple(profile.output_bytes for profile in profiles),
        outside_weights=sum(p.numel() for p in module.parameters()) - sum(weights),
    )


def timeless(cluster: Cluster) -> Cluster:
    """The cluster with all that moves bytes infinitely fast, for work that is not in seconds."""
    free = Wire()
    return replace(cluster, node=free, network=free, memory_bandwidth=float("inf"))


@dataclass(frozen=True)
class Decision:
    """The grids that were compared.

    Attributes:
        fitting: one plan for each number of stages that fits, the best first.
        too_large: one for each that does not.
        available: bytes that a rank may take.
    """

    fitting: list[Plan]
    too_large: list[Plan]
    available: float

    @property
    def g_inter(self) -> int:
        """Stages of the best grid."""
        return self.fitting[0].choice.g_inter

    def __str__(self) -> str:
        """Tell the choice, and why."""
        best, *others = self.fitting
        told = [
            f"g_inter='auto' takes {_grid(best)}: {best.memory / 1e9:.3g} of "
            f"{self.available / 1e9:.3g} GB a rank, bubble {best.simulation.bubble:.0%}."
        ]
        if others:
            second = others[0]
            slower = _seconds(second) / _seconds(best) - 1
            told.append(
                f"Next best: {_grid(second)}, {second.memory / 1e9:.3g} GB, bubble "
                f"{second.simulation.bubble:.0%}, {slower:.0%} slower."
            )
        if self.too_large:
            needed = ", ".join(f"{_grid(p)} ({p.memory / 1e9:.3g} GB)" for p in self.too_large)
            told.append(f"Too large: {needed}.")
        return " ".join(told)


def default_microbatches(g_inter: int) -> int:
    """Micro-batches of a replica's batch where a user gives no number."""
    return 4 * g_inter if g_inter > 1 else 1


def choose(job: Job, microbatches: int | None, in_flight: int | None) -> Decision:
    """Compare all grids of a job's devices by the time that a sample takes.

    Args:
        job: what is trained, and on what; its ``batch`` is ignored, a sample is a micro-batch of
            a pipeline.
        microbatches: of a replica's batch; None for the default, which without a pipeline is one
            of as many samples as would otherwise be micro-batches.
        in_flight: the in-flight limit; None for what fits, from as many as stages to twice it.

    Raises:
        MisconfigurationException: if no grid fits.
    """
    fitting: list[Plan] = []
    too_large: list[Plan] = []
    for g_inter in divisors(job.cluster.devices):
        if g_inter > len(job.layers.forward):
            break
        limits = [in_flight] if in_flight else [2 * g_inter, g_inter]
        share = min(microbatches or 4 * g_inter, _SIMULATED * g_inter)
        number = share if microbatches else default_microbatches(g_inter)
        most = microbatches or number
        whole = replace(job, batch=share * job.cluster.devices // g_inter)
        choices = (Choice(g_inter, share // number, min(limit, most)) for limit in limits)
        plans = [evaluate(whole, choice) for choice in choices]
        fits = [plan for plan in plans if plan.memory <= job.cluster.memory]
        (fitting if fits else too_large).append((fits or plans)[0 if fits else -1])
    if not fitting:
        least = min(too_large, key=lambda plan: plan.memory)
        raise MisconfigurationException(
            f"g_inter='auto' finds no grid of {job.cluster.devices} ranks that fits: a rank may "
            f"take {job.cluster.memory / 1e9:.3g} GB, and {_grid(least)}, the most economical, "
            f"needs about {least.memory / 1e9:.3g} GB. Use more ranks, more and smaller "
            "micro-batches or recompute='sqrt', or give g_inter a number to try it all the same."
        )
    return Decision(sorted(fitting, key=_seconds), too_large, job.cluster.memory)


def _seconds(plan: Plan) -> float:
    """Time that a sample takes."""
    samples = plan.g_data * plan.microbatches * plan.choice.microbatch
    return plan.simulation.makespan / samples


def _grid(plan: Plan) -> str:
    g_inter = plan.choice.g_inter
    return f"{g_inter} stage{'s' * (g_inter > 1)} x {plan.g_data} replica{'s' * (plan.g_data > 1)}"
