"""Compares all grids of a cluster by their time per sample, for ``g_inter="auto"``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.planning.search import Choice, Plan, Workload, evaluate
from lightning_axosparse.support.troubleshooting import see

_SIMULATED = 64
"""Most micro-batches per stage that are simulated: more hardly change the result, and take time."""


@dataclass(frozen=True)
class GridComparison:
    """The compared grids.

    Attributes:
        fitting: one plan for each number of stages that fits into memory, the fastest first.
        too_large: one plan for each number of stages that does not.
        available: bytes of memory available to a rank.
    """

    fitting: list[Plan]
    too_large: list[Plan]
    available: float

    @property
    def g_inter(self) -> int:
        """Stages of the fastest grid."""
        return self.fitting[0].choice.g_inter

    def __str__(self) -> str:
        """Describe the chosen grid and the alternatives."""
        best, *others = self.fitting
        sentences = [
            f"g_inter='auto' takes {_grid(best)}: {best.memory / 1e9:.3g} of "
            f"{self.available / 1e9:.3g} GB a rank, bubble {best.simulation.bubble:.0%}."
        ]
        if others:
            second = others[0]
            slower = _seconds(second) / _seconds(best) - 1
            sentences.append(
                f"Next best: {_grid(second)}, {second.memory / 1e9:.3g} GB, bubble "
                f"{second.simulation.bubble:.0%}, {slower:.0%} slower."
            )
        if self.too_large:
            needed = ", ".join(f"{_grid(p)} ({p.memory / 1e9:.3g} GB)" for p in self.too_large)
            sentences.append(f"Too large: {needed}.")
        return " ".join(sentences)


def default_microbatches(g_inter: int) -> int:
    """Return the micro-batches per batch and replica if the user sets no number."""
    return 4 * g_inter if g_inter > 1 else 1


def compare_grids(
    workload: Workload, microbatches: int | None, in_flight: int | None
) -> GridComparison:
    """Compare all grids of a workload's devices by the time per sample.

    Args:
        workload: the layers and the cluster; its ``batch`` is ignored, and one sample stands for
            one micro-batch of a pipeline.
        microbatches: per batch and replica; None for the default. With one stage the default is
            one micro-batch of as many samples as a pipeline would have micro-batches.
        in_flight: the in-flight limit; None for the larger of ``2 * g_inter`` and ``g_inter`` that
            fits.

    Raises:
        MisconfigurationException: if no grid fits into memory.
    """
    fitting: list[Plan] = []
    too_large: list[Plan] = []
    for g_inter in divisors(workload.cluster.devices):
        if g_inter > len(workload.layers.forward):
            break
        limits = [in_flight] if in_flight else [2 * g_inter, g_inter]
        batch = min(microbatches or 4 * g_inter, _SIMULATED * g_inter)
        number = batch if microbatches else default_microbatches(g_inter)
        most = microbatches or number
        scaled = replace(workload, batch=batch * workload.cluster.devices // g_inter)
        choices = (Choice(g_inter, batch // number, min(limit, most)) for limit in limits)
        plans = [evaluate(scaled, choice) for choice in choices]
        fits = [plan for plan in plans if plan.memory <= workload.cluster.memory]
        (fitting if fits else too_large).append((fits or plans)[0 if fits else -1])
    if not fitting:
        least = min(too_large, key=lambda plan: plan.memory)
        raise MisconfigurationException(
            f"g_inter='auto' finds no grid of {workload.cluster.devices} ranks that fits: a rank "
            f"may take {workload.cluster.memory / 1e9:.3g} GB, and {_grid(least)}, the most "
            f"economical, needs about {least.memory / 1e9:.3g} GB. Use more ranks, more and "
            "smaller micro-batches or recompute='sqrt', or give g_inter a number to try it "
            "all the same." + see("grid")
        )
    return GridComparison(sorted(fitting, key=_seconds), too_large, workload.cluster.memory)


def _seconds(plan: Plan) -> float:
    """Return the seconds per sample."""
    samples = plan.g_data * plan.microbatches * plan.choice.microbatch
    return plan.simulation.makespan / samples


def _grid(plan: Plan) -> str:
    g_inter = plan.choice.g_inter
    return f"{g_inter} stage{'s' * (g_inter > 1)} x {plan.g_data} replica{'s' * (plan.g_data > 1)}"
