"""Finds the fastest grid for a model and a cluster: the command ``axosparse-plan``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from axosparse_commands.arguments import MODELS, plan_options, plan_parser
from lightning_axosparse.callbacks.report.tables import Section, terminal
from lightning_axosparse.callbacks.timeline import RecordedStep, gantt
from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.planning.cost import DENSE, SPARSE, Cluster, Transformer
from lightning_axosparse.planning.search import Plan, Workload, search
from lightning_axosparse.planning.simulate import Wire

_MAX_SPANS = 3000
"""Spans in a chart: more would be too narrow to see and take minutes to plot."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = plan_parser()
    options = plan_options(parser, arguments)
    best: list[tuple[float, Plan]] = []
    for ratio in options.pruning_ratio:
        try:
            plans = search(_workload(options, ratio), options.best)
        except ValueError as error:
            parser.exit(1, f"Pruning ratio {ratio:g}: {error}\n")
        best.append((ratio, plans[0]))
        name = "x".join(map(str, options.shape)) if options.shape else options.model
        Console().print(terminal([table(plans, f"{name}, {_ratio_text(ratio)}")]))
    if options.gantt is not None:
        plot(best, options.gantt)


_COLUMNS = (
    *(
        "stages x\n[tensor x]\nreplicas\n(experts\nover)",
        "micro-\nbatches\nx samples",
        "in\nflight",
    ),
    *("GB per\ndevice", "bubble", "mes-\nsages\ns", "all-\nreduce\ns", "step\ns"),
)


def table(plans: Sequence[Plan], title: str) -> Section:
    """Return a table with one row per plan."""
    rows = [
        (
            _grid_text(plan),
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


def _grid_text(plan: Plan) -> str:
    """Return the grid as in the first column.

    "4 x 2 x 8 (4)" has 4 stages, 2 tensor ranks and 8 replicas, of which groups of 4 divide the
    experts.
    """
    choice = plan.choice
    tensor = f"{choice.g_tensor} x " if choice.g_tensor > 1 else ""
    expert = f" ({choice.g_expert})" if choice.g_expert > 1 else ""
    return f"{choice.g_inter} x {tensor}{plan.g_data}{expert}"


def plot(plans: Sequence[tuple[float, Plan]], file: Path) -> None:
    """Write one picture with the Gantt charts of all plans, each with its pruning ratio."""
    steps = [RecordedStep(0, 0, "", plan.simulation.spans[:_MAX_SPANS]) for _, plan in plans]
    figure = gantt(steps)
    for axes, (ratio, plan) in zip(figure.axes, plans, strict=True):
        axes.set_title(
            f"{_ratio_text(ratio)}: {_grid_text(plan)} devices, "
            f"{plan.microbatches} micro-batches, {plan.choice.in_flight} in flight"
        )
    figure.savefig(file, dpi=120)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.0%} of the weights pruned" if ratio else "dense weights"


def _workload(options: argparse.Namespace, ratio: float) -> Workload:
    microseconds, giga = 1e-6 * options.latency, 1e9
    model = Transformer(*(options.shape or MODELS[options.model]))
    experts, top_k = (*options.experts, 1)[:2]
    return Workload(
        layers=replace(model, experts=experts, top_k=top_k).costs,
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
