"""The arguments of ``axosparse-plan`` and ``axosparse-sweep``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

_SHAPE = ("LAYERS", "WIDTH", "HEADS", "SEQUENCE", "VOCABULARY")
MODELS = {
    "gpt2": (12, 768, 12, 1024, 50257),
    "gpt2-xl": (48, 1600, 25, 1024, 50257),
    "gpt3-xl": (24, 2048, 16, 2048, 50257),
    "gpt3-2.7b": (32, 2560, 32, 2048, 50257),
    "gpt3-6.7b": (32, 4096, 32, 2048, 50257),
    "gpt3-13b": (40, 5120, 40, 2048, 50257),
}
"""Name -> the numbers of ``--shape``."""


def sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of ``axosparse-sweep``."""
    parser = argparse.ArgumentParser(
        prog="axosparse-sweep",
        description="Write the report of a sweep to its folder: sweep.csv, plots, and sweep.html "
        "with all of them. Jobs that failed are listed with the commands that repeat them.",
    )
    text = f"%(prog)s {version('lightning-axosparse')}"
    parser.add_argument("--version", action="version", version=text)
    parser.add_argument("folder", type=_folder, help="hydra.sweep.dir of axosparse-train -m")
    return parser


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of ``axosparse-plan``."""
    parser = argparse.ArgumentParser(
        prog="axosparse-plan",
        description="Simulate every grid, micro-batch and in-flight limit that fits into memory, "
        "and print the fastest.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {version('lightning-axosparse')}")
    add("--model", type=_model, default="gpt3-2.7b", help=f"the GPT: {', '.join(MODELS)}")
    add("--shape", type=_count, nargs=5, metavar=_SHAPE, help="a GPT of another shape")
    add(
        "--experts",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="experts (MLPs) of a block, and how many of them compute each token (1)",
    )
    add(
        "--tensor",
        type=_count,
        nargs="+",
        default=[1],
        metavar="N",
        help="ranks that share the layers of a stage; several numbers are compared",
    )
    add("--batch", type=_count, default=512, help="global batch size, in samples")
    add("--pruning-ratio", type=_ratio, nargs="+", default=[0.0], help="prints a table for each")
    add("--recompute", action="store_true", help="recompute activations in backward")
    add("--shard-optimizer", action="store_true", help="replicas divide the optimizer's state")
    add(
        "--overhead",
        type=_not_negative,
        default=0.05,
        help="time that sparse storage adds to a pass, as a fraction of it",
    )
    add("--best", type=_count, default=8, help="rows of a table")
    add("--gantt", type=_picture, help="plot a step of each best plan to this PNG file")
    _add_cluster_arguments(parser)
    return parser


def plan_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the arguments of ``axosparse-plan``; end the command if they contradict each other."""
    options = parser.parse_args(arguments)
    experts, *top_k = options.experts
    if len(top_k) > 1:
        parser.error("--experts takes the number of experts, and how many compute each token")
    if top_k and top_k[0] > experts:
        parser.error(
            f"--experts: {top_k[0]} of {experts} experts cannot compute a token. Give at most "
            f"{experts} as the second number"
        )
    _, width, heads, *_ = options.shape or MODELS[options.model]
    if width % heads:
        parser.error(
            f"--shape: WIDTH {width} is no multiple of HEADS {heads}, but heads are equally wide. "
            f"Choose another, such as WIDTH {width + -width % heads}"
        )
    for ranks in options.tensor:
        if options.devices % ranks:
            parser.error(
                f"--tensor: {ranks} ranks that share layers do not divide {options.devices} "
                f"devices. Choose a divisor of {options.devices}, or other --devices"
            )
    return options


def _add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--devices", type=_count, default=64, help="number of devices")
    add("--devices-per-node", type=_count, default=8, help="devices of a node")
    add("--memory", type=_positive, default=80.0, help="GB of a device")
    add("--tflops", type=_positive, default=312.0, help="peak of a device, in TFLOP/s")
    add("--efficiency", type=_fraction, default=0.5, help="fraction of the peak in a pass")
    add("--memory-bandwidth", type=_positive, default=1500.0, help="GB/s of a device's memory")
    add("--node-bandwidth", type=_positive, default=200.0, help="GB/s between devices of a node")
    add("--network-bandwidth", type=_positive, default=25.0, help="GB/s of a node to others")
    add("--latency", type=_not_negative, default=10.0, help="microseconds of a message")


def _argument_type(
    convert: Callable[[str], Any], wanted: str, fits: Callable[[Any], bool]
) -> Callable[[str], Any]:
    """Return a function that converts and validates an argument, for argparse's ``type``."""

    def read(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return read


_model = _argument_type(
    str,
    f"a model that is known: {', '.join(MODELS)}. Any other is given by its shape: "
    f"--shape {' '.join(_SHAPE)}, such as --shape {' '.join(map(str, MODELS['gpt2']))}",
    MODELS.__contains__,
)
_folder = _argument_type(Path, "a folder", Path.is_dir)
_ratio = _argument_type(float, "a ratio: from 0 up to below 1", lambda ratio: 0 <= ratio < 1)
_count = _argument_type(int, "a count: a whole number, 1 or more", lambda count: 1 <= count < 2**31)
_fraction = _argument_type(float, "a fraction: above 0, at most 1", lambda part: 0 < part <= 1)
_not_negative = _argument_type(float, "a finite number, at least 0", lambda value: 0 <= value < inf)
_positive = _argument_type(float, "a positive number", lambda value: 0 < value < inf)
_picture = _argument_type(
    Path,
    "a .png file in a folder that exists",
    lambda file: file.suffix == ".png" and file.parent.is_dir(),
)
