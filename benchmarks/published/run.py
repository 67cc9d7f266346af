"""Does the planner predict published runs? Calibrates on one row of a table, predicts the others.

Usage: python benchmarks/published/run.py      (prints the tables of the README, in half a minute)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from axosparse_commands.arguments import MODELS as SHAPES
from lightning_axosparse.planning.cost import Cluster, LayerCosts, Storage, Transformer
from lightning_axosparse.planning.search import Choice, Plan, Workload, evaluate
from lightning_axosparse.planning.simulate import Wire

MODELS = {name: Transformer(*shape) for name, shape in SHAPES.items()}

# Summit: nodes of six V100 with 16 GB, NVLink.
PEAK, DEVICES_PER_NODE, MEMORY = 125e12, 6, 16e9
MEMORY_BANDWIDTH, NODE_BANDWIDTH, LATENCY = 700e9, 50e9, 1e-5

# Bytes of state by Singh & Bhatele 2022 (offloaded optimizer, buckets of 4 M) and 2023.
OFFLOADED = Storage(per_weight=4, per_unpruned=0, gradient=2, fixed=16 * 4e6)
MIXED = Storage(per_weight=0, per_unpruned=20, gradient=2)
SAMO = Storage(per_weight=2, per_unpruned=24, gradient=2)


def solve(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the falling function ``f`` crosses zero, by bisection of the exponent."""
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if f(middle) > 0 else (low, middle)
    return low


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |")


def head(title: str, *columns: str) -> None:
    print(f"\n### {title}\n")
    row(*columns)
    row("---", *["--:"] * (len(columns) - 1))


def flops(model: Transformer, batch: int) -> float:
    """Of a step with activation checkpointing, as the papers count them for the peak."""
    return 4 * batch * model.layers * model.layer_flops + 3 * batch * model.head_flops


def summit(devices: int, speed: float, network: float, overhead: float) -> Cluster:
    return Cluster(
        devices=devices,
        devices_per_node=DEVICES_PER_NODE,
        memory=MEMORY,
        speed=speed,
        memory_bandwidth=MEMORY_BANDWIDTH,
        node=Wire(LATENCY, NODE_BANDWIDTH, overhead),
        network=Wire(LATENCY, network, overhead),
    )


# --- AxoNN, weak scaling -------------------------------------------------------------------------

# name: model, GPUs, G_inter, micro-batch, percentage of the peak
AXONN = {
    "12B": (Transformer(48, 4512, 24, 512, 51200), 48, 6, 8, 54.78),
    "24B": (Transformer(48, 6336, 36, 512, 51200), 96, 12, 4, 54.0),
    "50B": (Transformer(96, 6528, 48, 512, 51200), 192, 24, 4, 52.5),
    "100B": (Transformer(96, 9360, 60, 512, 51200), 384, 48, 2, 49.4),
}


def axonn(name: str, speed: float, batch: int = 16384) -> tuple[Plan, float]:
    """The plan of one row and its percentage of the peak."""
    model, devices, g_inter, microbatch, _ = AXONN[name]
    cluster = summit(devices, speed, network=12.5e9, overhead=0.0)
    workload = Workload(model.costs, cluster, batch, OFFLOADED, recompute=True)
    plan = evaluate(workload, Choice(g_inter, microbatch, g_inter))
    reached = flops(model, batch) / plan.simulation.makespan / devices / PEAK
    return plan, 100 * reached


def print_axonn() -> None:
    first = AXONN["12B"][-1]
    speed = solve(lambda speed: first - axonn("12B", speed)[1], 1e12, PEAK)
    head(
        "AxoNN, weak scaling (percentage of the peak)",
        "model / GPUs",
        "published",
        "predicted",
        "error",
        "bubble",
        "all-reduce s",
        "step s",
        "GB a device",
    )
    for name, (_, devices, _, _, published) in AXONN.items():
        plan, reached = axonn(name, speed)
        error = "calibrated" if name == "12B" else f"{reached / published - 1:+.1%}"
        row(
            f"{name} / {devices}",
            published,
            f"{reached:.1f}",
            error,
            f"{plan.simulation.bubble:.1%}",
            f"{plan.all_reduce_seconds:.1f}",
            f"{plan.simulation.makespan:.0f}",
            f"{plan.memory / 1e9:.1f}",
        )
    print(f"\nCalibrated: a pass reaches {speed / PEAK:.1%} of the peak.")


# --- SAMO, strong scaling ------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The calibrated numbers.

    speed: flop/s of a pass; network: bytes/s of a node in collectives; message: bytes/s at which
    messages keep a stage busy; overhead: time that compression adds to a pass.
    """

    speed: float
    network: float
    message: float
    overhead: float


PUBLISHED_2_7B = {128: (5.05, 3.95), 256: (3.35, 2.3), 512: (2.25, 1.5)}  # seconds, from a figure
SAVED_2_7B = {  # by messages, bubble, all-reduce, in per cent of AxoNN's step
    128: (18, 9, 6),
    256: (16.17, 13.17, 11.08),
    512: (4, 15, 21),
}
REDUCTIONS = {  # batch, then GPUs: less time than AxoNN, in per cent
    "gpt3-xl": (512, {64: 10, 128: 21, 256: 34, 512: 47}),
    "gpt3-6.7b": (1024, {128: 11, 256: 16, 512: 22, 1024: 23}),
    "gpt3-13b": (2048, {256: 19, 512: 19, 1024: 22, 2048: 26}),
}
PEAK_13B = {256: (43.3, 53.4), 512: (39.7, 48.8), 1024: (32.2, 41.1), 2048: (22.9, 31.0)}
BYTES_2_7B = {0.0: 80.16e9, 0.9: 20.28e9, 0.8: 20.28e9 * (24 * 0.2 + 2) / (24 * 0.1 + 2)}


def stages(model: Transformer, ratio: float) -> int:
    """The smallest power of two for which a stage's part of the model fits into a device.

    The bytes per weight are those measured for 2.7B (at 80 % scaled by SAMO's formula).
    """
    needed = model.weights / MODELS["gpt3-2.7b"].weights * BYTES_2_7B[ratio]
    return 2 ** max(0, math.ceil(math.log2(needed / MEMORY)))


def samo(
    model: Transformer,
    devices: int,
    batch: int,
    ratio: float,
    constants: Constants,
    g_inter: int | None = None,
) -> Plan:
    """One run; pruned by ``ratio`` where that is not zero, in micro-batches of one sample."""
    g_inter = g_inter or stages(model, ratio)
    workload = Workload(
        model.costs,
        summit(
            devices, constants.speed, constants.network, model.message_bytes / constants.message
        ),
        batch,
        SAMO if ratio else MIXED,
        ratio,
        recompute=True,
        overhead=constants.overhead if ratio else 0.0,
    )
    return evaluate(workload, Choice(g_inter, 1, g_inter))


def sent(g_inter: int, batch: int, devices: int) -> float:
    """Messages of the stage that sends most, of one sample each."""
    return min(g_inter - 1, 2) * batch * g_inter / devices


def parts(plan: Plan, constants: Constants) -> tuple[float, float, float]:
    """Seconds in messages, bubble and all-reduce of 2.7B's step."""
    simulation = plan.simulation
    messages = min(plan.choice.g_inter - 1, 2) * plan.microbatches
    return (
        messages * MODELS["gpt3-2.7b"].message_bytes / constants.message,
        simulation.bubble * float(simulation.pipeline_end.max()),
        plan.all_reduce_seconds,
    )


def calibrate() -> Constants:
    """From 2.7B on 128 GPUs: both step times, and what messages and the all-reduce saved."""
    model, devices, batch = MODELS["gpt3-2.7b"], 128, 512
    dense_seconds, sparse_seconds = PUBLISHED_2_7B[devices]
    messages, _, reduced = (dense_seconds * saved / 100 for saved in SAVED_2_7B[devices])

    counts = [sent(stages(model, ratio), batch, devices) for ratio in (0.0, 0.9)]
    message = model.message_bytes * (counts[0] - counts[1]) / messages

    def run(ratio: float, speed: float, network: float, overhead: float) -> Plan:
        constants = Constants(speed, network, message, overhead)
        return samo(model, devices, batch, ratio, constants)

    def reduced_by(network: float) -> float:
        dense, sparse = (run(ratio, PEAK, network, 0.0) for ratio in (0.0, 0.9))
        return dense.all_reduce_seconds - sparse.all_reduce_seconds

    network = solve(lambda network: reduced_by(network) - reduced, 1e8, 1e12)
    speed = solve(
        lambda speed: run(0.0, speed, network, 0.0).simulation.makespan - dense_seconds,
        1e12,
        PEAK,
    )
    overhead = solve(
        lambda overhead: sparse_seconds - run(0.9, speed, network, overhead).simulation.makespan,
        1e-4,
        5.0,
    )
    return Constants(speed, network, message, overhead)


def print_2_7b(constants: Constants) -> None:
    model = MODELS["gpt3-2.7b"]
    grids = " and ".join(str(stages(model, ratio)) for ratio in (0.0, 0.9))
    head(
        f"SAMO, GPT-3 2.7B at 90 % ({grids} stages)",
        "GPUs",
        "AxoNN s: published, predicted, error",
        "SAMO s: published, predicted, error",
        "messages saved, %",
        "bubble saved, %",
        "all-reduce saved, %",
    )
    for devices, published in PUBLISHED_2_7B.items():
        plans = [samo(model, devices, 512, ratio, constants) for ratio in (0.0, 0.9)]
        cells = []
        for plan, seconds in zip(plans, published, strict=True):
            predicted = plan.simulation.makespan
            error = "calibrated" if devices == 128 else f"{predicted / seconds - 1:+.0%}"
            cells.append(f"{seconds}, {predicted:.2f}, {error}")
        dense, sparse = (parts(plan, constants) for plan in plans)
        step = plans[0].simulation.makespan
        percentages = [100 * (a - b) / step for a, b in zip(dense, sparse, strict=True)]
        saved = zip(SAVED_2_7B[devices], percentages, strict=True)
        row(devices, *cells, *(f"{found}, {predicted:.0f}" for found, predicted in saved))
    print(
        f"\nCalibrated on 128 GPUs: a pass reaches {constants.speed / PEAK:.0%} of the peak, a "
        f"node {constants.network / 1e9:.0f} GB/s in collectives, messages keep a stage busy "
        f"at {constants.message / 1e9:.2f} GB/s, compression adds "
        f"{constants.overhead:.0%} to a pass."
    )


def print_reductions(constants: Constants) -> None:
    head(
        "SAMO at 90 %, the other models (less time than AxoNN, %)",
        "model, stages",
        "GPUs",
        "published",
        "predicted",
        "with half the stages of AxoNN",
    )
    for name, (batch, runs) in REDUCTIONS.items():
        model = MODELS[name]
        dense, sparse = (stages(model, ratio) for ratio in (0.0, 0.9))
        for devices, published in runs.items():
            pruned = samo(model, devices, batch, 0.9, constants).simulation.makespan
            predicted = [
                100 * (1 - pruned / plan.simulation.makespan)
                for plan in (
                    samo(model, devices, batch, 0.0, constants, g_inter)
                    for g_inter in (dense, dense // 2)
                )
            ]
            row(
                f"{name}, {dense} and {sparse}",
                devices,
                published,
                *(f"{less:.0f}" for less in predicted),
            )


def print_13b(constants: Constants) -> None:
    model = MODELS["gpt3-13b"]
    head("SAMO at 90 %, GPT-3 13B (percentage of the peak)", "GPUs", "AxoNN: published, predicted",
         "SAMO: published, predicted")  # fmt: skip
    for devices, published in PEAK_13B.items():
        cells = []
        for ratio, percentage in zip((0.0, 0.9), published, strict=True):
            seconds = samo(model, devices, 2048, ratio, constants).simulation.makespan
            cells.append(f"{percentage}, {100 * flops(model, 2048) / seconds / devices / PEAK:.1f}")
        row(devices, *cells)


def print_poster(constants: Constants, batch: int = 768) -> None:
    head(
        f"The poster's runs at 80 % (batch {batch} assumed)",
        "model / GPUs",
        "stages",
        "less time, %: published, predicted",
        "less all-reduce, %: published, predicted",
    )
    for name, devices, published, collectives in (
        ("gpt3-xl", 192, 14, "not given"),
        ("gpt3-2.7b", 384, 17, 66),
    ):
        model = MODELS[name]
        dense, pruned = (samo(model, devices, batch, ratio, constants) for ratio in (0.0, 0.8))
        less = 100 * (1 - pruned.simulation.makespan / dense.simulation.makespan)
        reduced = 100 * (1 - pruned.all_reduce_seconds / dense.all_reduce_seconds)
        row(
            f"{name} / {devices}",
            f"{dense.choice.g_inter} and {pruned.choice.g_inter}",
            f"{published}, {less:.0f}",
            f"{collectives}, {reduced:.0f}",
        )


# --- TED -----------------------------------------------------------------------------------------

# The state of a weight under 16-bit mixed precision with ZeRO 1: value, gradient, and 12 divided.
ZERO = Storage(per_weight=0, per_unpruned=16, gradient=2, optimizer=12)
TED_EXPERTS, TED_GPUS, TED_BATCH = 16, 128, 1024


def with_experts(model: Transformer, g_tensor: int, drops: bool, keeps: bool) -> LayerCosts:
    """The costs of a model with experts in every second block, which tensor ranks split, too.

    Args:
        model: the base model.
        g_tensor: ranks that share a layer.
        drops: whether each of these sends its share of the tokens alone, and all gather the rest.
        keeps: whether recomputation takes the results of collectives from the first pass.
    """
    dense, mixed = model.costs, replace(model, experts=TED_EXPERTS).costs
    # A collective of a forward pass, of recomputation and of a backward pass.
    times = 1.0 if keeps else 1.5
    shared = times * (3 if drops else 2) * model.message_bytes
    mixed = replace(
        mixed,
        token_bytes=tuple(times * b * (1 if drops else g_tensor) for b in mixed.token_bytes),
        shared_bytes=(shared,) * model.layers,
    )
    dense = replace(dense, shared_bytes=tuple(times * each for each in dense.shared_bytes))
    alternating = {
        field.name: tuple(
            (mixed if layer % 2 else dense).__dict__[field.name][layer]
            for layer in range(model.layers)
        )
        for field in fields(LayerCosts)
        if isinstance(getattr(dense, field.name), tuple)
    }
    return replace(dense, **alternating)


def ted(model: Transformer, g_tensor: int, saves: bool, constants: Constants) -> Plan:
    cluster = summit(TED_GPUS, constants.speed, constants.network, 0.0)
    layers = with_experts(model, g_tensor, saves, saves)
    options = {"recompute": True, "shard_optimizer": True, "splits_experts": True}
    workload = Workload(layers, cluster, TED_BATCH, ZERO, **options)
    microbatches = TED_BATCH * g_tensor // TED_GPUS
    choice = Choice(1, 1, microbatches, TED_EXPERTS, g_tensor)
    return evaluate(workload, choice)


def largest_base(g_tensor: int, constants: Constants) -> float:
    """The weights of the largest base model that fits, by its width; in flight is one sample."""
    width = 0
    while True:
        model = Transformer(32, width + 128, max(1, width // 128), 2048, 50257)
        plan = ted(model, g_tensor, True, constants)
        # Passes of a batch alternate without a pipeline, so one sample's activations are kept.
        others = (plan.microbatches - 1) * model.layers * model.message_bytes
        if plan.memory - others > MEMORY:
            return Transformer(32, width, 1, 2048, 50257).weights
        width += 128


def print_ted(constants: Constants) -> None:
    head(
        "TED, GPT-3 6.7B with 16 experts in every second block, 128 GPUs",
        "tensor ranks",
        "less time by its savings, %: published, predicted",
        "step s: without, with",
        "largest base model, times that of one rank: published, predicted",
    )
    smallest = largest_base(1, constants)
    for g_tensor in (2, 4, 8):
        without, saving = (
            ted(MODELS["gpt3-6.7b"], g_tensor, saves, constants) for saves in (False, True)
        )
        seconds = without.simulation.makespan, saving.simulation.makespan
        row(
            g_tensor,
            f"21, {100 * (1 - seconds[1] / seconds[0]):.0f}",
            f"{seconds[0]:.1f}, {seconds[1]:.1f}",
            f"4 to 8, {largest_base(g_tensor, constants) / smallest:.1f}",
        )


def main() -> None:
    print_axonn()
    constants = calibrate()
    print_2_7b(constants)
    print_reductions(constants)
    print_13b(constants)
    print_poster(constants)
    print_ted(constants)


if __name__ == "__main__":
    main()
