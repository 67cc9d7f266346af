"""Finds the fastest grid for a model and a cluster: the command ``axosparse-plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_axosparse.callbacks.report.tables import Section, terminal
from lightning_axosparse.callbacks.timeline import RecordedStep, gantt
from lightning_axosparse.distributed.grid import divisors
from lightning_axosparse.planning.cost import DENSE, SPARSE, Cluster, Transformer
from lightning_axosparse.planning.search import Plan, Workload, search
from lightning_axosparse.planning.simulate import Wire
from lightning_axosparse.support.arguments import COUNT, NOT_NEGATIVE, Kind, number

MODELS = {
    "gpt2": Transformer(layers=12, width=768, heads=12, sequence=1024, vocabulary=50257),
    "gpt2-xl": Transformer(layers=48, width=1600, heads=25, sequence=1024, vocabulary=50257),
    "gpt3-xl": Transformer(layers=24, width=2048, heads=16, sequence=2048, vocabulary=50257),
    "gpt3-2.7b": Transformer(layers=32, width=2560, heads=32, sequence=2048, vocabulary=50257),
    "gpt3-6.7b": Transformer(layers=32, width=4096, heads=32, sequence=2048, vocabulary=50257),
    "gpt3-13b": Transformer(layers=40, width=5120, heads=40, sequence=2048, vocabulary=50257),
}

_SHAPE = ("LAYERS", "WIDTH", "HEADS", "SEQUENCE", "VOCABULARY")
_DRAWN = 3000
"""Most spans in a chart: more are too narrow to see and take minutes to plot."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = _parser()
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
    model = Transformer(*options.shape) if options.shape else MODELS[options.model]
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="axosparse-plan",
        description="Simulate every grid, micro-batch and in-flight limit that fits into memory, "
        "and print the fastest.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {version('lightning-axosparse')}")
    add("--model", choices=MODELS, default="gpt3-2.7b", help="what to train")
    add("--shape", type=_count, nargs=5, metavar=_SHAPE, help="a GPT of your own instead")
    add(
        "--experts",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="multi-layer perceptrons of a block, and how many of these a token goes to (1)",
    )
    add(
        "--tensor",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="how many ranks share the layers of a stage; several to compare",
    )
    add("--batch", type=_count, default=512, help="samples of a step, over all replicas")
    add("--pruning-ratio", type=_ratio, nargs="+", default=[0.0], help="a table for each")
    add("--recompute", action="store_true", help="recompute activations in backward")
    add("--shard-optimizer", action="store_true", help="replicas divide the optimizer's state")
    add(
        "--overhead",
        type=_not_negative,
        default=0.05,
        help="time that sparse storage adds to a pass, as a fraction of it",
    )
    add("--devices", type=_count, default=64, help="devices in all")
    add("--devices-per-node", type=_count, default=8, help="devices of a node")
    add("--memory", type=_positive, default=80.0, help="GB of a device")
    add("--tflops", type=_positive, default=312.0, help="peak of a device")
    add("--efficiency", type=_fraction, default=0.5, help="fraction of the peak in a pass")
    add("--memory-bandwidth", type=_positive, default=1500.0, help="GB/s of a device's memory")
    add("--node-bandwidth", type=_positive, default=200.0, help="GB/s between devices of a node")
    add("--network-bandwidth", type=_positive, default=25.0, help="GB/s of a node to others")
    add("--latency", type=_not_negative, default=10.0, help="microseconds of a message")
    add("--best", type=_count, default=8, help="rows of a table")
    add("--gantt", type=_picture, help="draw the best plans' steps into this PNG file")
    return parser


def _read(convert: Callable[[str], Any], kind: Kind) -> Callable[[str], Any]:
    """Return what converts and validates an argument; argparse shows its error."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not kind.fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.wanted}")
        return value

    return read


_ratio = _read(float, number("a ratio: from 0 up to below 1", lambda ratio: 0 <= ratio < 1))
_count = _read(int, Kind(f"a count: {COUNT.wanted}", COUNT.fits))
_fraction = _read(float, number("a fraction: above 0, at most 1", lambda part: 0 < part <= 1))
_not_negative = _read(float, NOT_NEGATIVE)
_positive = _read(float, number("a positive number", lambda value: 0 < value < inf))
_picture = _read(
    Path,
    Kind(
        "a .png file in a folder that exists",
        lambda file: file.suffix == ".png" and file.parent.is_dir(),
    ),
)


if __name__ == "__main__":
    main()
