"""Finds the fastest grid for a model and a cluster: the command ``axosparse-plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from axosparse_commands.arguments import MODELS
from axosparse_commands.arguments import plan as arguments_of_plan
from lightning_axosparse.callbacks.report.tables import Section, terminal
from lightning_axosparse.callbacks.timeline import RecordedStep, gantt
from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.planning.cost import DENSE, SPARSE, Cluster, Transformer
from lightning_axosparse.planning.search import Plan, Workload, search
from lightning_axosparse.planning.simulate import Wire

_DRAWN = 3000
"""Most spans in a chart: more are too narrow to see and take minutes to plot."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = arguments_of_plan()
    options = parser.parse_args(arguments)
    best: list[tuple[float, Plan]] = []
    for ratio in options.pruning_ratio:
        try:
            plans = search(_workload(options, ratio), options.best)
        except ValueError as error:
            parser.exit(1, f"Pruning ratio {ratio:g}: {error}\n")
        best.append((ratio, plans[0]))
        name = "x".join(map(str, options.shape)) if options.shape else options.model
        Console().print(terminal([table(plans, f"{name}, {_weights(ratio)}")]))
    if options.gantt is not None:
        plot(best, options.gantt)


_COLUMNS = (
    *(
        "stages x\n[tensor x]\nreplicas\n(experts\nover)",
        "micro-\nbatches\nx samples",
        "in\nflight",
    ),
    *("GB a\ndevice", "bubble", "mes-\nsages\ns", "all-\nreduce\ns", "step\ns"),
)


def table(plans: Sequence[Plan], title: str) -> Section:
    """Return a table with one row per plan."""
    rows = [
        (
            _grid(plan),
            f"{plan.microbatches} x {plan.choice.microbatch}",
            str(plan.choice.in_flight),
            f"{plan.memory / 1e9:.2f}",
            f"{plan.simulation.bubble:.1%}",
            f"{plan.message_seconds:.2g}",
            f"{plan.all_reduce_seconds:.3g}",
            f"{plan.simulation.makespan:.4g}",
        )
        for plan in plans
    ]
    return Section(title, _COLUMNS, rows)


def _grid(plan: Plan) -> str:
    """Stages, ranks that share one, and replicas, over how many of which experts are spread."""
    choice = plan.choice
    shared = f"{choice.g_tensor} x " if choice.g_tensor > 1 else ""
    spread = f" ({choice.g_expert})" if choice.g_expert > 1 else ""
    return f"{choice.g_inter} x {shared}{plan.g_data}{spread}"


def plot(plans: Sequence[tuple[float, Plan]], file: Path) -> None:
    """Write one picture with the Gantt charts of all plans, each with its pruning ratio."""
    figure = gantt([RecordedStep(0, 0, "", plan.simulation.spans[:_DRAWN]) for _, plan in plans])
    for axes, (ratio, plan) in zip(figure.axes, plans, strict=True):
        axes.set_title(
            f"{_weights(ratio)}: {_grid(plan)} devices, "
            f"{plan.microbatches} micro-batches, {plan.choice.in_flight} in flight"
        )
    figure.savefig(file, dpi=120)


def _weights(ratio: float) -> str:
    return f"{ratio:.0%} of the weights pruned" if ratio else "dense weights"


def _workload(options: argparse.Namespace, ratio: float) -> Workload:
    microseconds, giga = 1e-6 * options.latency, 1e9
    model = Transformer(*(options.shape or MODELS[options.model]))
    experts, top_k = (*options.experts, 1)[:2]
    return Workload(
        layers=replace(model, experts=experts, top_k=min(experts, top_k)).costs,
        cluster=Cluster(
            devices=options.devices,
            devices_per_node=options.devices_per_node,
            memory=options.memory * giga,
            speed=options.tflops * 1e12 * options.efficiency,
            memory_bandwidth=options.memory_bandwidth * giga,
            node=Wire(microseconds, options.node_bandwidth * giga),
            network=Wire(microseconds, options.network_bandwidth * giga),
        ),
        batch=options.batch,
        storage=SPARSE if ratio else DENSE,
        pruning_ratio=ratio,
        recompute=options.recompute,
        overhead=options.overhead if ratio else 0.0,
        shard_optimizer=options.shard_optimizer,
        g_expert=tuple(divisors(experts)),
        g_tensor=tuple(dict.fromkeys(options.tensor)),
    )


if __name__ == "__main__":
    main()
